"""How the turns of an episode become tokens: in a raw prompt, or in the model's chat template.

Enters: the prompt of an environment, a turn of the policy, the answer to it. Leaves: the ids of the prompt, what the environment is asked,
and the ids that follow the turn.
"""

import json
from collections.abc import Sequence
from contextlib import closing
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

from rlvr_cli.config.shared.episodes import EpisodeOptions
from rlvr_cli.environments.interface import Reply
from rlvr_cli.environments.open import EnvironmentSpec
from rlvr_cli.environments.pool import Answer, EnvironmentPool
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import model_path
from rlvr_cli.samplers.stop_strings import response_text
from rlvr_cli.types import ENVIRONMENT, ChatThinking, Completion, Request


class Piece(NamedTuple):
    """What is put into a response by the environment."""

    role: str
    ids: list[int]
    text: str


class Turns(Protocol):
    """What an episode asks of the way in which its turns become tokens."""

    def prompt(self, answer: Answer, request: Request) -> tuple[str, tuple[int, ...] | None]:
        """The prompt of an episode, and its ids if it is not to be tokenized. Raises ValueError if that of the environment cannot be one."""
        ...

    def asked(self, completion: Completion) -> str | None:
        """What the environment is asked after a turn of the policy; None: nothing, the episode ends."""
        ...

    def following(self, ids: Sequence[int], completion: Completion, reply: Reply) -> list[Piece]:
        """What follows the last turn, `completion`, which `ids` end with."""
        ...


class TextTurns:
    """Turns in a raw prompt: a stop string calls the environment, whose text is tokenized alone.

    Args:
        tokenizer: of the policy.
        stop: of the environment; see `Environment`.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids = lru_cache(maxsize=256)(self._tokenized)  # samples of a question are often answered alike

    def prompt(self, answer: Answer, request: Request) -> tuple[str, tuple[int, ...] | None]:
        if isinstance(answer.prompt, list):
            raise RlvrError("The environment begins with messages, and the prompt is raw text.", "Add --chat.")
        return (request.prompt, request.prompt_ids) if answer.prompt is None else (answer.prompt, None)

    def asked(self, completion: Completion) -> str | None:
        return completion.text if _calls(completion, self._stop) else None

    def following(self, ids: Sequence[int], completion: Completion, reply: Reply) -> list[Piece]:
        return [Piece(said.role, self._ids(said.text), said.text) for said in reply.calls or (reply,)]

    def _tokenized(self, text: str) -> list[int]:
        """The tokens of an environment's text; a marker of the chat template in it is text like any other."""
        return self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] if text else []


class ChatTurns:
    """Turns in the model's chat template: what answers a turn is a message, and tools are called as the model was tuned to.

    Args:
        next_turn: a `models.tokens.next_turn.NextTurn`.
        stop: as for `TextTurns`.
        calls: whether there are tools.
        every: whether the environment hears every turn, as JSON {text, calls}, and says itself when the episode ends.
    """

    def __init__(self, next_turn: Any, stop: Sequence[str], *, calls: bool, every: bool = False) -> None:
        self._next, self._stop, self._calls, self._every = next_turn, stop, calls, every

    def prompt(self, answer: Answer, request: Request) -> tuple[str, tuple[int, ...] | None]:
        if answer.prompt is None:
            return request.prompt, request.prompt_ids
        messages = [{"role": "user", "content": answer.prompt}] if isinstance(answer.prompt, str) else answer.prompt
        try:
            text, ids = self._next.prompt(messages)
        except RlvrError as error:
            raise ValueError(f"begin() returned a prompt that cannot be shown: {error.problem}") from error
        return text, tuple(ids)

    def asked(self, completion: Completion) -> str | None:
        if not self._calls:
            return completion.text if _calls(completion, self._stop) else None
        if completion.finish_reason == "length":
            return None
        told = self._next.chat.tools or not self._every
        calls = self._next.calls(completion.prompt_ids, completion.token_ids) if told else []
        if self._every:
            return json.dumps({"text": completion.text, "calls": calls})
        return json.dumps(calls) if calls else None

    def following(self, ids: Sequence[int], completion: Completion, reply: Reply) -> list[Piece]:
        said = reply.calls or (reply,)
        if reply.done and not any(one.text for one in said):
            return []
        messages = [self._message(one, number) for number, one in enumerate(said)]
        turn = len(completion.token_ids)
        pieces = self._next.after(ids[: len(ids) - turn], ids[len(ids) - turn :], messages)
        tokenizer = self._next.chat.tokenizer
        return [Piece(one.role, i, response_text(tokenizer, i)) for one, i in zip(said, pieces, strict=True)]

    def _message(self, said: Reply, number: int) -> dict[str, Any]:
        from rlvr_cli.models.tokens.chat import tool_message  # here: endpoints do without transformers

        if self._calls and said.role != ENVIRONMENT:
            return tool_message(said.role, said.text, number)
        return {"role": "user" if said.role == ENVIRONMENT else said.role, "content": said.text}


def environment_spec(config: EpisodeOptions) -> EnvironmentSpec:
    """What --environment and --tool name."""
    return EnvironmentSpec(config.environment, config.tool, config.chat)


def told_tools(config: EpisodeOptions) -> list[dict[str, Any]]:
    """What the chat template is told of --environment and --tool; a process is started that runs their files.

    Raises:
        RlvrError: there is no such tool, or it lacks types or descriptions.
    """
    return _schemas(environment_spec(config)) if config.plays_episodes and environment_spec(config).calls else []


def gives_rewards(config: EpisodeOptions) -> bool:
    """Whether the environment gives the rewards, and no grader judges; a process is started that runs a user's file.

    Raises:
        RlvrError: the environment cannot be loaded, or there is a --grader, too.
    """
    spec = environment_spec(config)
    if not spec.of_verifiers and not (spec.is_file and _gives_rewards(spec, config.turn_timeout)):
        return False
    if config.grader and config.sources.get("grader") != "resumed run":  # runs with one were begun
        raise RlvrError(
            f"The environment {spec.title} gives the rewards, and so does --grader {config.grader}.",
            "Leave --grader out.",
        )
    return True


@cache
def _gives_rewards(spec: EnvironmentSpec, timeout: float) -> bool:
    with closing(EnvironmentPool(spec, workers=1, timeout=timeout)) as pool:
        return pool.gives_rewards


@cache
def _schemas(spec: EnvironmentSpec) -> list[dict[str, Any]]:
    with closing(EnvironmentPool(spec, workers=1)) as pool:
        return pool.schemas


def chat_turns(config: EpisodeOptions, *, tools: Sequence[dict[str, Any]] | None = None) -> Any:
    """The `NextTurn` of the model with --chat. Its chat template is checked once.

    Args:
        tools: schemas of those that it is told of; None: of --environment and --tool.

    Raises:
        RlvrError: it has no chat template, or one that cannot go on after a turn; or as `told_tools`.
    """
    told = json.dumps(told_tools(config) if tools is None else tools)
    path = model_path(config.model)
    return _next_turn(config.model, path=path, thinking=config.chat_thinking, system=config.chat_system, tools=told)


@lru_cache(maxsize=4_096)  # each row of a dataset may have tools of its own
def _next_turn(model: str, *, path: str, thinking: ChatThinking, system: str, tools: str) -> Any:
    from rlvr_cli.models.tokens.chat import ChatTemplate  # here: endpoints do without transformers
    from rlvr_cli.models.tokens.next_turn import NextTurn

    tokenizer, markers, ends = _tokenizer(path)
    chat = ChatTemplate(path, thinking=thinking, system=system, tools=json.loads(tools), tokenizer=tokenizer)
    chat.check_tools()
    return NextTurn(chat, ends=ends, model=model, markers=markers)


@cache
def _tokenizer(path: str) -> tuple[Any, Any, tuple[int, ...]]:
    """The tokenizer of a model, its markers, and what ends its responses."""
    from rlvr_cli.models.pretrained import load_end_tokens, load_tokenizer  # here: endpoints do without transformers
    from rlvr_cli.models.tokens.markers import Markers

    tokenizer = load_tokenizer(path)
    return tokenizer, Markers(tokenizer, name=path), load_end_tokens(path, tokenizer)


def _calls(completion: Completion, stop: Sequence[str]) -> bool:
    """Whether a turn calls the environment: its stop string ended it, or, without any, the policy did."""
    return completion.stop_reason in stop if stop else completion.finish_reason == "stop"
