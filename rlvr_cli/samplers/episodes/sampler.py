"""Episodes: a sampler around a sampler, in which an environment answers the policy turn after turn.

Enters: a sampler that reports token ids, an environment's pool, requests with their examples. Leaves: a completion for each episode,
with all its turns. Ids that were sampled are never tokenized again: the next request is the prompt, all ids so far, and the ids
that follow the turn (`turns`).

There is no barrier between the turns: an episode whose environment has answered joins the sampler's running call (`types.JoinableSampler`),
and the others go on meanwhile.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from rlvr_cli.environments.pool import Answer, EnvironmentPool
from rlvr_cli.environments.repeat import Repeats, Said
from rlvr_cli.process import stoppable
from rlvr_cli.samplers.episodes.playing import Playing
from rlvr_cli.samplers.episodes.turns import Piece, TextTurns, Turns
from rlvr_cli.samplers.stop_strings import prompt_token_ids, response_text
from rlvr_cli.samplers.wrapper import SamplerWrapper, seed_of_part
from rlvr_cli.types import Completion, Grade, JoinableSampler, Request, SamplingParams


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
        sampler: JoinableSampler,
        tokenizer: Any,
        pool: EnvironmentPool,
        *,
        turns: Turns | None = None,
        max_turns: int,
        longest: Callable[[int], int],
        trains: bool = False,
    ) -> None:
        super().__init__(sampler)
        self._sampler = sampler
        self.tokenizer, self.pool = tokenizer, pool
        self.turns = turns or TextTurns(tokenizer, pool.stop)
        self.max_turns, self.longest, self.trains = max_turns, longest, trains

    @property
    def context_length(self) -> int | None:
        """As `types.JoinableSampler.context_length`."""
        return self._sampler.context_length

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Generator[Completion]:
        """Play an episode for every seed of every request, which has an example; they come in the order in which they end.

        Raises:
            RlvrError: the environment cannot be loaded, is not a function of example, seed and turns while the policy is trained, or what
                the sampler raises.
        """
        self.arrived = ()
        own = replace(params, stop=tuple(dict.fromkeys((*params.stop, *self.pool.stop))))
        table = _Table(self, requests, own)
        try:
            asked = table.first_round(requests)
            yield from table.ended()
            while asked:
                with closing(self._sampler.sample(asked, own, more=table)) as completions:
                    for completion in completions:
                        table.add(completion)
                        yield from table.ended()
                asked = table.next_round()
                yield from table.ended()
            table.check()
        except Exception:  # what has ended by then is kept
            yield from table.ended()
            raise
        finally:
            self.arrived = tuple(table.ended())
            table.cancel()


class _Table:
    """The episodes of one call. To a sampler it is `types.MoreTurns`.

    Args:
        player: plays them.
        requests: one for each example, with a seed for each episode.
        params: of each turn; `max_tokens` are the policy's of an episode.
    """

    def __init__(self, player: EpisodeSampler, requests: Sequence[Request], params: SamplingParams) -> None:
        self._player, self._params = player, params
        self._context = player.context_length
        self._prompts = prompt_token_ids(player.tokenizer, requests, vocab_size=len(player.tokenizer))
        self._playing: list[Playing] = []  # all episodes
        self._begun: list[Future[Answer] | None] = []  # how each begins; None: with the dataset's prompt
        self._asked: list[list[Playing]] = []  # those of each request in the running call of the sampler
        self._waiting: dict[Future[Answer], tuple[Playing, Completion]] = {}  # for the environment
        self._done: SimpleQueue[Future[Answer]] = SimpleQueue()  # those of them that it has answered
        self._notify: Callable[[], None] = lambda: None
        self._ended: deque[Completion] = deque()
        self._repeats = Repeats(player.pool, strict=player.trains)

    @property
    def most_tokens(self) -> int:
        return max(len(prompt) + self._room(len(prompt)) for prompt in self._prompts)

    def awaits(self, key: tuple[int, int]) -> bool:
        return not self._asked[key[0]][key[1]].over

    def notify(self, call: Callable[[], None]) -> None:
        self._notify = call

    def first_round(self, requests: Sequence[Request]) -> list[Request]:
        """Begin all episodes, and return the requests for their first turns: one for the episodes with the same prompt."""
        pool, asked, prompts = self._player.pool, [], []
        for index, request in enumerate(requests):
            assert request.example is not None, "an episode needs its example"
            for sample, seed in enumerate(request.seeds):
                self._begun.append(pool.begin(request.example, seed) if pool.begins else None)
                self._playing.append(Playing(index, sample, seed, request.example))
        for playing, future in zip(self._playing, self._begun, strict=True):
            with stoppable():
                answer = future.result() if future else Answer()
            if answer.error is not None:
                self._fail(playing, answer)
                continue
            request, playing.seconds = requests[playing.request_index], answer.seconds
            playing.begun = answer.prompt
            try:
                playing.prompt, ids = self._player.turns.prompt(answer, request)
            except ValueError as problem:
                self._refuse(playing, str(problem))
                continue
            same = self._asked[-1][0] if self._asked else None
            if same and (same.request_index, same.prompt) == (playing.request_index, playing.prompt):
                self._asked[-1].append(playing)
                continue
            more = {"prompt_ids": ids, "max_tokens": self._rest(playing), "common_prefix": request.common_prefix}
            own = Request(playing.prompt, (), name=request.name, **more)
            prompt = self._prompts[playing.request_index] if answer.prompt is None else self._tokens(own)
            if answer.prompt is not None and (detail := self._too_long(prompt, playing)):
                playing.prompt = None
                self._refuse(playing, detail)
                continue
            self._asked.append([playing])
            asked.append(own)
            prompts.append(prompt)
        self._prompts = prompts
        return [replace(r, seeds=tuple(p.seed for p in group)) for r, group in zip(asked, self._asked, strict=True)]

    def _tokens(self, request: Request) -> list[int]:
        (ids,) = prompt_token_ids(self._player.tokenizer, [request], vocab_size=len(self._player.tokenizer))
        return ids

    def _too_long(self, prompt: Sequence[int], playing: Playing) -> str:
        """Why a prompt of the environment leaves no room for the policy; empty if it does."""
        most = self._rest(playing)
        if self._context is None or len(prompt) + most <= self._context:
            return ""
        return (
            f"begin() returned a prompt of {len(prompt):,} tokens; with the {most:,} that the policy may sample, "
            f"they are more than the {self._context:,} of the model's context"
        )

    def next_round(self) -> list[Request]:
        """Wait for the environment, and return the requests of all episodes that go on: the sampler's call ended before."""
        self._asked.clear()
        asked: list[Request] = []
        while more := self.take(wait=True):
            asked += more
        return asked

    def take(self, *, wait: bool) -> list[Request]:
        """Return the requests of the episodes whose environment has answered; with `wait`, none only if it has nothing to answer."""
        asked: list[Request] = []
        while self._waiting and (not self._done.empty() or (wait and not asked)):
            with stoppable():
                future = self._done.get()
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
            marker = self._player.pool.marker  # of turns that it hears, the environment counts them
            playing.add_forged(completion.text.count(marker) if marker else 0)
            self._end(playing, completion, by="length" if completion.finish_reason == "length" else "policy")
        else:
            playing.asked.append(asked)
            future = self._player.pool.answer(playing.example, playing.seed, playing.asked)
            self._waiting[future] = playing, completion
            future.add_done_callback(self._take_note)

    def _take_note(self, answered: Future[Answer]) -> None:
        """In the thread of a process: it has answered."""
        self._done.put(answered)
        self._notify()

    def ended(self) -> Generator[Completion]:
        """Yield the episodes that have ended."""
        while self._ended:
            yield self._ended.popleft()

    def cancel(self) -> None:
        """Forget what the environment has not answered yet, and the episodes that have not ended."""
        for future in filter(None, (*self._begun, *self._waiting)):
            future.cancel()
        for playing in self._playing:
            if not playing.over:
                self._player.pool.end(playing.seed)
        self._waiting.clear()
        self._repeats.cancel()

    def check(self) -> None:
        """Compare the episodes that were played again, see `Repeats.check`."""
        self._repeats.check()

    def _answered(self, playing: Playing, completion: Completion, answer: Answer) -> Request | None:
        """Take the environment's answer. Returns the request for the next turn; None: the episode has ended."""
        playing.seconds += answer.seconds
        playing.add_forged(answer.forged)
        if answer.reply is None:
            return self._fail(playing, answer, completion)
        pieces = self._player.turns.following(playing.prompt_ids + playing.ids, completion, answer.reply)
        playing.add_reply(answer.reply, self._fitting(pieces, room=self._left(playing)))
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

    def _rest(self, playing: Playing) -> int:
        """Tokens that the policy may still sample in an episode."""
        return min(self._params.max_tokens - playing.num_policy_tokens, self._left(playing))

    def _left(self, playing: Playing) -> int:
        """Tokens that a response may still get."""
        return self._room(len(playing.prompt_ids)) - len(playing.ids)

    def _room(self, num_prompt_tokens: int) -> int:
        """Tokens of the longest response to a prompt. The context ends it, unless it does not even hold the policy's: that is refused."""
        most = self._player.longest(self._params.max_tokens)
        if self._context is None:
            return most
        return max(min(most, self._context - num_prompt_tokens), min(most, self._params.max_tokens))

    def _end(self, playing: Playing, last: Completion, *, by: str) -> None:
        playing.over = True
        if by != "environment":
            self._player.pool.end(playing.seed)
        if by != "error":
            self._repeats.add(Said(playing.example, playing.seed, playing.begun, playing.asked, playing.replies))
        self._ended.append(playing.completion(last, ended_by=by, gives_rewards=self._player.pool.gives_rewards))

    def _refuse(self, playing: Playing, detail: str) -> None:
        """End an episode in which the environment's prompt cannot be taken."""
        self._player.pool.say_failed("ValueError", detail)
        self._fail(playing, Answer(error="ValueError", detail=detail))

    def _fail(self, playing: Playing, answer: Answer, last: Completion | None = None) -> None:
        playing.grade = Grade(None, None, None, error=answer.error, error_detail=answer.detail)
        if last is None:
            ids = tuple(self._prompts[playing.request_index])
            last = Completion(0, 0, "", ids, (), (), len(ids), 0, "stop", None, None)
            playing.add_turn(last)
        self._end(playing, last, by="error")
