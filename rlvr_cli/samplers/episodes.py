"""Episodes: a sampler around a sampler, in which an environment answers the policy turn after turn.

Enters: a sampler that reports token ids, an environment's pool, requests with their examples. Leaves: a completion for each episode,
with all its turns. Ids that were sampled are never tokenized again: the next request is the prompt, all ids so far, and the ids
that follow the turn (`turns`).

There is no barrier between the turns where the sampler's running call takes further requests (`types.JoinableSampler`): an episode
whose environment has answered joins it, and the others go on meanwhile. With other samplers all episodes take a turn together.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from rlvr_cli.config.shared.episodes import EpisodeOptions
from rlvr_cli.environments.interface import Reply
from rlvr_cli.environments.open import check_environment
from rlvr_cli.environments.pool import Answer, EnvironmentPool
from rlvr_cli.environments.repeat import Repeats, Said
from rlvr_cli.errors import RlvrError
from rlvr_cli.process import stoppable
from rlvr_cli.samplers.stop_strings import prompt_token_ids, response_text
from rlvr_cli.samplers.turns import ChatTurns, Piece, TextTurns, Turns, chat_turns, environment_spec
from rlvr_cli.samplers.wrapper import SamplerWrapper, mean_entropy, seed_of_part
from rlvr_cli.terminal import console
from rlvr_cli.types import (
    ENVIRONMENT,
    Completion,
    Episode,
    Example,
    Grade,
    Request,
    Sampler,
    SamplingParams,
    Turn,
    TurnFacts,
)

BARRIER = "All episodes take a turn together with this engine: a slow tool delays the others."


@dataclass
class _Playing:
    """An episode under way."""

    request_index: int
    sample_index: int
    seed: int
    example: Example
    begun: str | list[dict[str, Any]] | None = None  # of the environment
    prompt: str | None = None
    prompt_ids: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    mask: tuple[bool, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # of the turns
    spoken: list[Completion] = field(default_factory=list)  # the policy's turns
    asked: list[str] = field(default_factory=list)  # the environment, of each of them
    rewards: list[float | None] = field(default_factory=list)
    calls: int = 0
    forged: int = 0
    failed_turns: tuple[int, ...] = ()
    forged_turns: tuple[int, ...] = ()
    seconds: float = 0.0
    grade: Grade | None = None
    over: bool = False
    replies: list[Reply] = field(default_factory=list)  # as the environment gave them

    @property
    def num_policy_tokens(self) -> int:
        return sum(self.mask)

    def add_turn(self, completion: Completion) -> None:
        """Add a turn of the policy."""
        self.prompt_ids = self.prompt_ids or completion.prompt_ids
        self._add("policy", completion.token_ids, completion.text, logprobs=completion.logprobs)
        self.spoken.append(completion)
        self.rewards.append(None)

    def add_forged(self, answers: int) -> None:
        """Count answers of the environment that the policy's last turn holds."""
        self.forged += answers
        self.forged_turns += (len(self.spoken) - 1,) * (answers > 0)

    def add_reply(self, reply: Reply, pieces: Iterable[Piece]) -> None:
        """Add what the environment said to the last turn: of its text as much as there is room for."""
        self.replies.append(reply)
        self.rewards[-1] = reply.reward
        for said in reply.calls or (reply,):
            self.calls += said.role != ENVIRONMENT
            self.failed_turns += (len(self.spoken) - 1,) * (said.error is not None)
        for role, ids, text in pieces:
            if ids:
                self._add(role, tuple(ids), text)

    def _add(self, role: str, ids: tuple[int, ...], text: str, *, logprobs: tuple[float, ...] | None = None) -> None:
        start = len(self.ids)
        self.ids += ids
        self.logprobs += (0.0,) * len(ids) if logprobs is None else logprobs
        self.mask += (logprobs is not None,) * len(ids)
        self.turns.append(Turn(role, start, len(self.ids)))
        self.texts.append(text)

    def completion(self, last: Completion, *, ended_by: str, gives_rewards: bool) -> Completion:
        """The episode as a completion, whose last turn of the policy was `last`."""
        cut = ended_by == "length"
        grade = self.grade
        if grade is None and gives_rewards:
            total = sum(reward or 0.0 for reward in self.rewards)
            grade = Grade(None, None, total, failure_kind=None if total > 0.5 else "low_reward")
        ends = tuple(accumulate(map(len, self.texts)))
        last_own = max(place for place, turn in enumerate(self.turns) if turn.role == "policy")
        episode = Episode(
            num_turns=len(self.spoken),
            num_policy_tokens=self.num_policy_tokens,
            ended_by=ended_by,
            tool_calls=self.calls,
            tool_errors=len(self.failed_turns),
            forged=self.forged,
            environment_seconds=self.seconds,
            turn_rewards=tuple(self.rewards) if any(r is not None for r in self.rewards) else None,
            graded_from=ends[last_own] - len(self.texts[last_own]),
            graded_to=ends[last_own],
        )
        whole = len(self.turns) == 1
        return replace(
            last,
            request_index=self.request_index,
            sample_index=self.sample_index,
            text="".join(self.texts),
            prompt_ids=self.prompt_ids,
            num_prompt_tokens=len(self.prompt_ids),
            token_ids=self.ids,
            logprobs=self.logprobs,
            num_tokens=len(self.ids),
            finish_reason="length" if cut else "stop",
            stop_reason=None if cut else last.stop_reason,
            mean_entropy=mean_entropy(self.spoken),
            response_mask=None if whole else self.mask,
            turns=None if whole else tuple(self.turns),
            prompt=self.prompt,
            episode=episode,
            turn_facts=TurnFacts(ends, self.failed_turns, self.forged_turns),
            grade=grade,
        )


class EpisodeSampler(SamplerWrapper):
    """Plays episodes with the policy of another sampler.

    `SamplingParams.max_tokens` bounds the policy's tokens of an episode, `min_tokens` each of its turns.

    Args:
        sampler: reports token ids.
        tokenizer: of the sampler's model.
        pool: the environment; closed by its owner.
        turns: how its turns become tokens; None: as in a raw prompt.
        max_turns: of the policy.
        longest: the most tokens of the policy -> those of a response with what the environment says.
        trains: whether the policy is trained on the episodes; else an environment that is no function is only said.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: Any,
        pool: EnvironmentPool,
        *,
        turns: Turns | None = None,
        max_turns: int,
        longest: Callable[[int], int],
        trains: bool = False,
    ) -> None:
        super().__init__(sampler)
        self.tokenizer, self.pool = tokenizer, pool
        self.turns = turns or TextTurns(tokenizer, pool.stop)
        self.max_turns, self.longest, self.trains = max_turns, longest, trains
        self._joins = getattr(sampler, "joins", False)

    @property
    def notes(self) -> Sequence[str]:
        return [*self._sampler.notes, *([] if self._joins else [BARRIER])]

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Generator[Completion]:
        """Play an episode for every seed of every request, which has an example; they come in the order in which they end.

        Raises:
            RlvrError: the environment cannot be loaded, is not a function of example, seed and turns while the policy is trained, or what
                the sampler raises.
        """
        own = replace(params, stop=tuple(dict.fromkeys((*params.stop, *self.pool.stop))))
        table = _Table(self, requests, own)
        try:
            asked = table.first_round(requests)
            yield from table.ended()
            while asked:
                given = {"more": table} if self._joins else {}
                with closing(self._sampler.sample(asked, own, **given)) as completions:
                    for completion in completions:
                        table.add(completion)
                        yield from table.ended()
                asked = table.next_round()
                yield from table.ended()
            table.check()
        finally:
            table.cancel()


def environment_facts(config: EpisodeOptions) -> dict[str, Any]:
    """What run.json stores of --environment and --tool. Raises RlvrError unless they exist; files are read, but not run."""
    spec = environment_spec(config)
    check_environment(spec)
    return spec.facts


@contextmanager
def open_environment(config: EpisodeOptions, *, grader: str, quiet: bool = False) -> Iterator[EnvironmentPool | None]:
    """Open the processes of --environment and --tool until the block ends; None where there are none.

    Args:
        grader: --grader.
        quiet: another process says how the turns of a chat model follow each other.

    Raises:
        RlvrError: the environment cannot be loaded, the chat template cannot go on after a turn, or the environment gives the rewards
            and there is a grader, too.
    """
    if not config.plays_episodes:
        yield None
        return
    spec = environment_spec(config)
    pool = EnvironmentPool(
        spec,
        workers=config.environment_workers,
        timeout=config.turn_timeout,
        report=lambda sentence: console.say(f"note: {sentence}"),
    )
    with closing(pool):
        if pool.gives_rewards and grader:
            raise RlvrError(
                f"The environment {spec.title} gives the rewards, and so does --grader {grader}.", "Leave --grader out."
            )
        if config.chat:
            way = chat_turns(config).way
            if not quiet:
                console.say(f"note: in the chat template, {way}")
        yield pool


def played(
    sampler: Sampler, config: EpisodeOptions, tokenizer: Any, pool: EnvironmentPool | None, *, trains: bool
) -> Sampler:
    """Return a sampler that plays episodes, see `EpisodeSampler`; without an environment, or if it does so in its own process, itself."""
    if pool is None or getattr(sampler, "plays_episodes", False):
        return sampler
    turns = ChatTurns(chat_turns(config), pool.stop, calls=pool.spec.calls) if config.chat else None
    return EpisodeSampler(
        sampler,
        tokenizer,
        pool,
        turns=turns,
        max_turns=config.max_turns,
        longest=config.longest_response,
        trains=trains,
    )


class _Table:
    """The episodes of one call: those that the policy is at, those that the environment is at, and those that have ended.

    To a sampler it is `types.MoreRequests`.
    """

    def __init__(self, player: EpisodeSampler, requests: Sequence[Request], params: SamplingParams) -> None:
        self._player, self._params = player, params
        self._room = player.longest(params.max_tokens)
        self._prompts = prompt_token_ids(player.tokenizer, requests, vocab_size=len(player.tokenizer))
        self._asked: list[list[_Playing]] = []  # the episodes of each request in the running call of the sampler
        self._waiting: dict[Future[Answer], tuple[_Playing, Completion]] = {}  # for the environment
        self._ended: deque[Completion] = deque()
        self._repeats = Repeats(player.pool, strict=player.trains)

    @property
    def most_tokens(self) -> int:
        return max(map(len, self._prompts)) + self._room

    def awaits(self, key: tuple[int, int]) -> bool:
        return not self._asked[key[0]][key[1]].over

    def first_round(self, requests: Sequence[Request]) -> list[Request]:
        """Begin all episodes, and return the requests for their first turns: one for the episodes with the same prompt."""
        pool, asked = self._player.pool, []
        begun: list[tuple[_Playing, Future[Answer] | None]] = []
        for index, request in enumerate(requests):
            assert request.example is not None, "an episode needs its example"
            for sample, seed in enumerate(request.seeds):
                future = pool.begin(request.example, seed) if pool.begins else None
                begun.append((_Playing(index, sample, seed, request.example), future))
        for playing, future in begun:
            with stoppable():
                answer = future.result() if future else Answer()
            if answer.error is not None:
                self._fail(playing, answer)
                continue
            request, playing.seconds = requests[playing.request_index], answer.seconds
            playing.begun = answer.prompt
            playing.prompt, ids = self._player.turns.prompt(answer, request)
            same = self._asked[-1][0] if self._asked else None
            if same and (same.request_index, same.prompt) == (playing.request_index, playing.prompt):
                self._asked[-1].append(playing)
            else:
                self._asked.append([playing])
                asked.append(
                    Request(playing.prompt, (), name=request.name, prompt_ids=ids, max_tokens=self._rest(playing))
                )
        asked = [replace(r, seeds=tuple(p.seed for p in group)) for r, group in zip(asked, self._asked, strict=True)]
        if pool.begins:
            self._prompts = prompt_token_ids(self._player.tokenizer, asked, vocab_size=len(self._player.tokenizer))
        return asked

    def next_round(self) -> list[Request]:
        """Wait for the environment, and return the requests of all episodes that go on."""
        self._asked.clear()
        asked: list[Request] = []
        while more := self.take(wait=True):
            asked += more
        return asked

    def take(self, *, wait: bool) -> list[Request]:
        """Return the requests of the episodes whose environment has answered; with `wait`, none only if it has nothing to answer."""
        asked: list[Request] = []
        while self._waiting and not asked:
            done = [future for future in self._waiting if future.done()]
            if not done and not wait:
                break
            for future in done or _first(self._waiting):
                playing, completion = self._waiting.pop(future)
                if request := self._answered(playing, completion, future.result()):
                    self._asked.append([playing])
                    asked.append(request)
        return asked

    def add(self, completion: Completion) -> None:
        """Take a turn of the policy: the environment answers it, or the episode ends."""
        playing = self._asked[completion.request_index][completion.sample_index]
        playing.add_turn(completion)
        asked = self._player.turns.asked(completion)
        if asked is None:
            self._end(playing, completion, by="length" if completion.finish_reason == "length" else "policy")
        else:
            playing.asked.append(asked)
            future = self._player.pool.answer(playing.example, playing.seed, playing.asked)
            self._waiting[future] = playing, completion

    def ended(self) -> Generator[Completion]:
        """Yield the episodes that have ended."""
        while self._ended:
            yield self._ended.popleft()

    def cancel(self) -> None:
        """Forget what the environment has not answered yet."""
        for future in self._waiting:
            future.cancel()
        self._waiting.clear()
        self._repeats.cancel()

    def check(self) -> None:
        """Compare the episodes that were played again, see `Repeats.check`."""
        self._repeats.check()

    def _answered(self, playing: _Playing, completion: Completion, answer: Answer) -> Request | None:
        """Take the environment's answer. Returns the request for the next turn; None: the episode has ended."""
        playing.seconds += answer.seconds
        playing.add_forged(answer.forged)
        if answer.reply is None:
            return self._fail(playing, answer, completion)
        pieces = self._player.turns.following(playing.prompt_ids + playing.ids, completion, answer.reply)
        playing.add_reply(answer.reply, self._fitting(pieces, room=self._room - len(playing.ids)))
        if answer.reply.done:
            return self._end(playing, completion, by="environment")
        if len(playing.asked) == self._player.max_turns:
            return self._end(playing, completion, by="turns")
        if self._rest(playing) < 1:
            return self._end(playing, completion, by="length")
        return Request(
            "",
            (seed_of_part(playing.seed, f"turn {len(playing.asked)}"),),
            name=playing.example.id,
            prompt_ids=playing.prompt_ids + playing.ids,
            after=(completion.request_index, completion.sample_index),
            max_tokens=self._rest(playing),
        )

    def _fitting(self, pieces: Iterable[Piece], *, room: int) -> Iterator[Piece]:
        """As much of what the environment said as there is room for."""
        for piece in pieces:
            if len(piece.ids) <= room:
                yield piece
            elif room:
                ids = piece.ids[:room]
                yield Piece(piece.role, ids, response_text(self._player.tokenizer, ids))
            room = max(room - len(piece.ids), 0)

    def _rest(self, playing: _Playing) -> int:
        """Tokens that the policy may still sample in an episode."""
        return min(self._params.max_tokens - playing.num_policy_tokens, self._room - len(playing.ids))

    def _end(self, playing: _Playing, last: Completion, *, by: str) -> None:
        playing.over = True
        if by != "error":
            self._repeats.add(Said(playing.example, playing.seed, playing.begun, playing.asked, playing.replies))
        self._ended.append(playing.completion(last, ended_by=by, gives_rewards=self._player.pool.gives_rewards))

    def _fail(self, playing: _Playing, answer: Answer, last: Completion | None = None) -> None:
        playing.grade = Grade(None, None, None, error=answer.error, error_detail=answer.detail)
        if last is None:
            ids = tuple(self._prompts[playing.request_index])
            last = Completion(0, 0, "", ids, (), (), len(ids), 0, "stop", None, None)
            playing.add_turn(last)
        self._end(playing, last, by="error")


def _first(futures: dict[Future[Answer], tuple[_Playing, Completion]]) -> set[Future[Answer]]:
    """Wait until some are done, and return these."""
    with stoppable():
        return wait(futures, return_when=FIRST_COMPLETED).done
