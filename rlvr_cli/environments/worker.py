"""A process in which environments live, started by `pool.EnvironmentPool`: one instance for each episode under way.

Enters: lists of questions ["begin", "answer" or "play_again", seed, example, turns of the policy], ["facts"] or ["schemas"], and of
["ended", seeds], which is not answered. Leaves: for each of the others what the environment says, or the error that it raised, and after how
many seconds. Before it comes `CALLED` for each call of a chat model's turn, as soon as it is answered. Before the first list comes {} once
the files have been run, then the facts: what an instance says of itself. Each is a line (`parallel/lines`).
An episode that this process does not know, since the one before died, is played again up to the last turn.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, SupportsFloat

from rlvr_cli.environments.interface import Environment, Reply
from rlvr_cli.environments.open import EnvironmentSpec, load_environment, load_functions
from rlvr_cli.environments.tools import CALLED, ChatTools, Tools, schema_of
from rlvr_cli.errors import RlvrError
from rlvr_cli.parallel.lines import TheirLines
from rlvr_cli.process import fork_guarded, limit_memory, memory_was_filled
from rlvr_cli.text import storable
from rlvr_cli.types import Example
from rlvr_cli.user_code import location, text_of

MOST_CHARACTERS = 8_000  # of a reply
_INFINITE = 2.0**128 - 2.0**103  # from here on in float32, in which rewards of turns are stored
_EPISODES = 10_000  # that one process keeps; others are played again


def serve(
    connection: Connection,
    *,
    name: str,
    tools: Sequence[str],
    chat: bool,
    path: Sequence[str],
    parent: int,
    memory_bytes: int,
) -> None:
    """Answer until the connection ends."""
    fork_guarded(parent)
    limit_memory(memory_bytes)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    sys.path[:0] = [entry for entry in path if entry not in sys.path]
    spec = EnvironmentSpec(name, tuple(tools), chat)
    lines, process = TheirLines(connection), os.getpid()
    try:
        make = load_environment(spec)
        lines.write({})  # what follows has the time of a turn
        first = make()
        check_sound(spec, first)
        facts = {
            "stop": list(getattr(first, "stop", ())),
            "gives_rewards": bool(getattr(first, "gives_rewards", False)),
            "begins": _keeps_a_state(first),
            "marker": str(getattr(first, "marker", "")),
        }
    except RlvrError as error:
        return lines.write({"problem": error.problem, "hint": error.hint})
    except Exception as error:  # of the user's own constructor
        problem = f"{spec.title} cannot be made: {_described(spec, error)}"
        return lines.write({"problem": problem, "hint": "Correct the file."})
    lines.write(facts)

    def say(message: dict[str, Any]) -> None:
        if os.getpid() != process:  # the user's code has forked, and this is the copy
            os._exit(0)
        lines.write(message)

    episodes, answered = _Episodes(make, chat=chat, called=lambda: say(CALLED)), 0
    for questions in lines.read():
        for kind, *question in questions:
            began = time.monotonic()
            if kind == "ended":
                episodes.end(*question)
                continue
            if kind == "facts":
                said = facts
            elif kind == "schemas":
                said = _schemas(spec, first)
            else:
                said = _answer(spec, episodes, kind, *question)
            if said.pop("is_filled", False) and answered:
                os._exit(0)  # earlier episodes have filled it: a process that is started afresh is asked again
            answered += 1
            say({**said, "seconds": time.monotonic() - began})


def check_sound(spec: EnvironmentSpec, environment: object) -> None:
    """Raise RlvrError unless an object has what an `Environment` must have."""
    for name in ("begin", "answer"):
        if not callable(getattr(environment, name, None)):
            raise RlvrError(
                f"{spec.title} makes {type(environment).__name__}, which has no method {name}.",
                "An environment is a class with begin(example, seed) and answer(turn).",
            )
    stop = getattr(environment, "stop", ())
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise RlvrError(
            f"The stop of {spec.title} is {stop!r:.100}, which is no tuple of strings.",
            f"Write stop = ({stop!r:.100},)." if isinstance(stop, str) else "For example stop = ('</guess>',).",
        )


class _Episodes:
    """The environments of the episodes under way, each with how many turns it has answered."""

    def __init__(self, make: Callable[[], Environment], *, chat: bool, called: Callable[[], None]) -> None:
        self._new, self._chat, self._called = make, chat, called
        self._under_way: dict[int, tuple[Environment, int]] = {}

    def _make(self) -> Environment:
        environment = self._new()
        if isinstance(environment, ChatTools):
            environment.called = self._called
        return environment

    def begin(self, seed: int, example: dict[str, Any]) -> dict[str, Any]:
        environment = self._make()
        try:
            prompt = _prompt(environment.begin(Example(**example), seed), chat=self._chat)
        except BaseException:
            _give_up(environment)
            raise
        self._keep(seed, environment, 0)
        return {"prompt": prompt}

    def answer(self, seed: int, example: dict[str, Any], turns: Sequence[str]) -> dict[str, Any]:
        environment, answered = self._under_way.pop(seed, (None, 0))
        if environment is None or answered != len(turns) - 1:
            _give_up(environment)
            environment = self._make()
            environment.begin(Example(**example), seed)
            answered = 0 if _keeps_a_state(environment) else len(turns) - 1
        try:
            for turn in turns[answered:-1]:
                environment.answer(turn)
            reply = _fields(environment.answer(turns[-1]))
        except BaseException:
            _give_up(environment)
            raise
        if not reply["done"]:
            self._keep(seed, environment, len(turns))
        marker = getattr(environment, "marker", "")
        return {"reply": reply, "forged": turns[-1].count(marker) if marker else 0}

    def play_again(self, seed: int, example: dict[str, Any], turns: Sequence[str]) -> dict[str, Any]:
        """Play a whole episode in an instance of its own, which is not kept."""
        environment = self._make()
        prompt = environment.begin(Example(**example), seed)
        replies: list[dict[str, Any]] = []
        try:
            replies += (_fields(environment.answer(turn)) for turn in turns)
        finally:
            if not (replies and replies[-1]["done"]):
                _give_up(environment)
        return {"prompt": _prompt(prompt, chat=self._chat), "replies": replies}

    def end(self, seeds: Sequence[int]) -> None:
        """Give up the environments of episodes that have ended otherwise than by these."""
        for seed in seeds:
            environment, _ = self._under_way.pop(seed, (None, 0))
            _give_up(environment)

    def _keep(self, seed: int, environment: Environment, answered: int) -> None:
        self._under_way[seed] = (environment, answered)
        if len(self._under_way) > _EPISODES:
            environment, _ = self._under_way.pop(next(iter(self._under_way)))
            _give_up(environment)


def _give_up(environment: object) -> None:
    """Let an environment put away what it has opened, where its episode did not end by itself."""
    if give_up := getattr(environment, "give_up", None):
        with suppress(Exception):  # it is nobody's answer
            give_up()


def _keeps_a_state(environment: object) -> bool:
    """Whether an answer depends on more than the turn."""
    return not isinstance(environment, Tools | ChatTools)


def _answer(
    spec: EnvironmentSpec, episodes: _Episodes, kind: str, seed: int, example: dict[str, Any], turns: Sequence[str]
) -> dict[str, Any]:
    try:
        match kind:
            case "begin":
                return episodes.begin(seed, example)
            case "answer":
                return episodes.answer(seed, example, turns)
            case _:
                return episodes.play_again(seed, example, turns)
    except BaseException as error:  # whatever the user's own code raises
        said = {"error": type(error).__name__, "detail": _described(spec, error)}
        return {**said, "is_filled": memory_was_filled(error)}


def _schemas(spec: EnvironmentSpec, environment: Any) -> dict[str, Any]:
    """What a chat model is told of the tools."""
    if spec.of_verifiers:
        return {"schemas": environment.schemas}
    try:
        return {"schemas": [schema_of(name, function) for name, function in load_functions(spec).items()]}
    except RlvrError as error:
        return {"problem": error.problem, "hint": error.hint}


def _prompt(prompt: object, *, chat: bool) -> str | list[dict[str, Any]] | None:
    """The prompt of an environment. Raises ValueError for an empty one or calls of tools, TypeError unless messages have `role` and `content`."""
    if prompt is None:
        return None
    if isinstance(prompt, Mapping):
        raise TypeError(f"begin() returned {prompt!r:.200}, not a text or a list of messages")
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        prompt = str(prompt)
    if not (prompt or (chat and isinstance(prompt, str))):
        raise ValueError("begin() returned an empty prompt; return None for that of the dataset")
    if isinstance(prompt, str):
        return storable(prompt)
    for message in prompt:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise TypeError(f"begin() returned the message {message!r:.200}, not {{role, content}} of text")
        if message.get("tool_calls"):
            raise ValueError("the prompt holds tool calls, which are not shown; write them as text")
    return [{"role": message["role"], "content": storable(message["content"])} for message in prompt]


def _fields(reply: object) -> dict[str, Any]:
    """The environment's answer as it is sent. Raises TypeError or ValueError unless it is a sound `Reply`."""
    if not isinstance(reply, Reply):
        raise TypeError(f"answer() returned {reply!r:.200}, not a Reply")
    words = (reply.text, reply.role, "" if reply.error is None else reply.error)
    if not all(isinstance(text, str) for text in words) or not isinstance(reply.reward, SupportsFloat | None):
        raise TypeError(f"answer() returned {reply!r:.200}, not a Reply of text, with a number as its reward")
    if reply.role in ("", "policy"):
        raise ValueError(f"a Reply has the role {reply.role!r}: name who says it, such as 'environment'")
    reward = None if reply.reward is None else float(reply.reward)  # also of numpy and torch
    if reward is not None and not abs(reward) < _INFINITE:
        raise ValueError(f"a reward of {reward}, not a finite number in float32")
    for name, value in (reply.measured or {}).items():
        if not isinstance(name, str) or not isinstance(value, SupportsFloat) or not math.isfinite(float(value)):
            raise ValueError(f"measured {name!r:.100} = {value!r:.100}, not a finite number with a name")
    measured = reply.measured and {storable(name): float(value) for name, value in reply.measured.items()}
    calls = [_fields(call) for call in reply.calls]
    if any(call.done or call.calls or call.reward is not None or call.measured for call in reply.calls):
        raise ValueError(
            "done, reward, measured or calls in one of the calls of a Reply: they belong to the Reply itself"
        )
    numbers = {"done": bool(reply.done), "reward": reward, "measured": measured}
    texts = {"text": _cut(storable(reply.text)), "role": storable(reply.role), "error": reply.error}
    return {**texts, "calls": calls, **numbers}


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[cut: {len(text) - 2 * half:,} characters]\n{text[-half:]}"


def _described(spec: EnvironmentSpec, error: BaseException) -> str:
    """The text of an exception, after FILE:LINE if it was raised in a user's file."""
    places = [location(file, object, error=error) for file in spec.files]
    raised = [place for file, place in zip(spec.files, places, strict=True) if place != file.rpartition(":")[0]]
    return ": ".join([*(raised or places)[:1], text_of(error) or type(error).__name__])
