"""Questions in progress, and the rows that wait for questions which come after others: the turns of episodes.

Enters: rows that end, and questions. Leaves: the rows in which these go on. While other work waits for rows, the keys and values of a row
that waits longer are copied out of the cache, and into a free row when its question has come.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr_cli.models.tokens.tokenization import encode_prompts
from rlvr_cli.samplers.embedded.cache import RowCache
from rlvr_cli.samplers.embedded.prefill import Prefix
from rlvr_cli.samplers.embedded.shared import SharedPrefix
from rlvr_cli.types import Request

Key = tuple[int, int]  # (request index, sample index) of what has ended

COMMON_TOKENS = 32  # that prompts begin with, and for which another pass is worth it
PARKED_STEPS = 32  # how long a row waits for what comes after it; the cache has so many columns more
# How long it waits in the cache while other work waits for a row; each of its later steps reads the columns that pass meanwhile, too.
TAKEN_OUT_STEPS = 2
TAKEN_OUT_SHARE = 0.25  # of the memory of the cache, for what is taken out of it


@dataclass(slots=True)
class Question:
    """A request in progress: its prompt, and those of its samples that have no row in the batch yet."""

    request_index: int
    prompt_ids: list[int]
    samples: deque[tuple[int, int]]  # (sample index, seed)
    prefix: Prefix | SharedPrefix | None = None  # None before the prefill
    common: tuple[int, ...] = ()  # what its prompt begins with, as those of others do
    shares: bool = False  # whether its samples read one copy of the prefix
    begun: int = 0  # see `types.Request`
    max_tokens: int | None = None  # of each sample; None: those of the parameters
    after: tuple[int, int] | None = None  # see `types.Request`

    @property
    def kept(self) -> int:
        """The tokens of the prompt that each of its rows has for itself."""
        return 1 if self.shares else len(self.prompt_ids)

    @property
    def beginning(self) -> list[int]:
        """The tokens of the response that are in the prompt."""
        return self.prompt_ids[len(self.prompt_ids) - self.begun :]


def common_token_ids(
    tokenizer: Any, requests: Sequence[Request], prompts: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Return the tokens of each request's common prefix, as far as they are those of its prompt; () if these are few.

    Its last token is left out, since the text after it may become part of it. A prompt alone decides: with which others it is sampled
    changes no bit.
    """
    texts = sorted({request.common_prefix for request in requests} - {""})
    found = {text: tuple(ids[:-1]) for text, ids in zip(texts, encode_prompts(tokenizer, texts), strict=True)}
    commons = [found.get(request.common_prefix, ()) for request in requests]
    return [
        common if len(common) >= COMMON_TOKENS and len(ids) > len(common) and (*ids[: len(common)],) == common else ()
        for common, ids in zip(commons, prompts, strict=True)
    ]


class Parked:
    """Rows that wait, and the questions that have come for them.

    Args:
        cache: of the rows.
        awaits: a key -> whether a question may come after it; None: none comes.

    Attributes:
        coming: questions that go on where one ended, as soon as a pass is due.
    """

    def __init__(self, cache: RowCache, awaits: Callable[[Key], bool] | None) -> None:
        self._cache, self.awaits = cache, awaits
        self._rows: dict[Key, int] = {}
        self._since: dict[Key, int] = {}  # the step before which it ended
        self._out: dict[Key, Prefix] = {}  # what was taken out of the cache
        self.coming: list[Question] = []

    def expects(self, question: Question) -> bool:
        """Whether this is known of what the question comes after."""
        return question.after in self._rows or question.after in self._out

    @property
    def lacks_rows(self) -> bool:
        """Whether a question has come for what was taken out, and no row is free."""
        return not self._cache.free and any(question.after in self._out for question in self.coming)

    def add(self, rows: Mapping[Key, int], *, step: int) -> None:
        """Park rows, which have ended before a step."""
        self._cache.park([*rows.values()])
        self._rows |= rows
        self._since |= dict.fromkeys(rows, step)

    def move(self, moved: Mapping[int, int]) -> None:
        """Rows are elsewhere now: old place -> new one."""
        self._rows = {key: moved.get(row, row) for key, row in self._rows.items()}

    def give_up(self, step: int) -> None:
        """Forget that after which nothing comes, and free rows that have waited for long."""
        awaits = self.awaits or (lambda key: False)
        over = [key for key in self._rows if step - self._since[key] >= PARKED_STEPS or not awaits(key)]
        if over:
            self._cache.release([self._rows.pop(key) for key in over])
        self._since = {key: self._since[key] for key in self._rows}
        self._out = {key: prefix for key, prefix in self._out.items() if awaits(key)}

    def take_out(self, step: int) -> None:
        """Copy out what has waited for a while, as far as the memory for it goes: others get its rows."""
        wanted = {question.after for question in self.coming}
        room = int(TAKEN_OUT_SHARE * len(self._cache.alive) * self._cache.columns)
        room -= sum(prefix[0][0].shape[1] for prefix in self._out.values())
        for key, row in [*self._rows.items()]:
            known = self._cache.known(row)
            if step - self._since[key] >= TAKEN_OUT_STEPS and key not in wanted and known <= room:
                self._out[key] = self._cache.take_out(self._rows.pop(key))
                room -= known

    def claim(self, *, max_tokens: int, passes: bool, steps: bool) -> tuple[list[tuple[int, Question]], list[Question]]:
        """Return the questions that go on now, with their rows, and those that have no row any more or none with room for them.

        Args:
            max_tokens: that are drawn for a question which says nothing else.
            passes: whether those go on which need a pass; the others need only the next step.
            steps: whether a step follows in any case, so that rows may wait for what it reads.
        """
        going, crowded, later = [], [], []
        for question in self.coming:
            assert question.after is not None
            if self._waits(question.after, len(question.prompt_ids), passes=passes, steps=steps):
                later.append(question)
                continue
            prefix = self._out.pop(question.after, None)
            row = self._rows.pop(question.after, None) if prefix is None else self._cache.put_back(prefix)
            if row is not None and self._fits(row, len(question.prompt_ids) + (question.max_tokens or max_tokens)):
                going.append((row, question))
                continue
            crowded.append(question)
            if row is not None:
                self._cache.release([row])
        self.coming = later
        return going, crowded

    def _waits(self, after: Key, num_prompt_tokens: int, *, passes: bool, steps: bool) -> bool:
        """Whether a question with so many tokens, after what has ended, goes on later than now."""
        if after in self._out:
            return not (passes and self._cache.free)
        row = self._rows.get(after)
        if row is None:
            return False
        if self._cache.lacks_step(row):
            return steps
        return not passes and self._cache.known(row) < num_prompt_tokens - 1

    def _fits(self, row: int, tokens: int) -> bool:
        return self._cache.fits(row, tokens - self._cache.known(row) + PARKED_STEPS)
