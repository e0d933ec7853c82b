"""The batch of rows that the embedded engine samples together: what is drawn for them, and when they end.

Enters: questions whose prompts have been prefilled. Leaves: completions, as soon as their rows end.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.compute.device import to_device, to_host
from rlvr_cli.samplers.embedded.cache import RowCache
from rlvr_cli.samplers.embedded.draw import draw_tokens, uniforms
from rlvr_cli.samplers.embedded.questions import Parked, Question
from rlvr_cli.samplers.embedded.shared import SharedPrefix
from rlvr_cli.samplers.stop_strings import StopStrings, response_text
from rlvr_cli.types import Completion, FinishReason, SamplingParams

RESUME_STEPS = 2  # between two passes for rows that go on: a row waits less than its share of another pass costs
RESUMED_TOKENS = 32768  # whose keys and values are copied at a time when rows go on


class Ending(NamedTuple):
    """How a response ended."""

    text: str
    finish_reason: FinishReason
    stop_reason: str | None


class Endings:
    """When a response ends: at EOS, at a stop string, or when it has `max_tokens`."""

    def __init__(self, params: SamplingParams, *, eos: Sequence[int], stops: StopStrings, device: torch.device) -> None:
        self._params, self._stops = params, stops
        self._eos = to_device(torch.tensor(eos, dtype=torch.int64), device)
        self._is_eos = np.zeros(len(stops.candidates), dtype=bool)
        self._is_eos[list(eos)] = True
        self._may_end = self._is_eos | stops.candidates

    def barred(self, young: np.ndarray) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (rows, tokens) that must not be drawn: EOS in the rows that are `young`, shorter than `min_tokens`."""
        if not len(self._eos) or not young.any():
            return None
        return to_device(torch.from_numpy(np.flatnonzero(young)), self._eos.device), self._eos

    def possible(self, tokens: np.ndarray, rest: np.ndarray) -> np.ndarray:
        """Return which rows may have ended, by their newest tokens and how many more may be drawn for them."""
        return self._may_end[tokens] | (rest == 0)

    def find(self, tokens: list[int], *, beginning: list[int], max_tokens: int) -> Ending | None:
        """Return how the newest token ended a response, or None.

        Args:
            tokens: drawn for it.
            beginning: its tokens before these.
            max_tokens: that may be drawn for it.
        """
        response = [*beginning, *tokens]
        # A token may be EOS, or the last one allowed, and complete a stop string: then the stop string is the reason.
        if self._stops.candidates[tokens[-1]]:
            found = self._stops.find(response, min_tokens=self._params.min_tokens)
            if found is not None:
                return Ending(found[0], "stop", found[1])
        if self._is_eos[tokens[-1]]:
            return Ending(response_text(self._stops.tokenizer, response), "stop", "eos")
        if len(tokens) == max_tokens:
            return Ending(response_text(self._stops.tokenizer, response), "length", None)
        return None


class Drawn:
    """What was drawn for each row: (rows, max_tokens) tokens, their log-probabilities and entropies.

    Those of step s are in column s modulo max_tokens: no row has more tokens than that.
    """

    def __init__(self, rows: int, max_tokens: int) -> None:
        self.tokens = np.zeros((rows, max_tokens), dtype=np.int64)
        self.logprobs = np.zeros((rows, max_tokens), dtype=np.float32)
        self.entropy = np.zeros((rows, max_tokens), dtype=np.float32)

    def add(self, step: int, tokens: np.ndarray, logprobs: np.ndarray, entropy: np.ndarray) -> None:
        rows, column = len(tokens), step % self.tokens.shape[1]
        self.tokens[:rows, column] = tokens
        self.logprobs[:rows, column] = logprobs
        self.entropy[:rows, column] = entropy

    def columns(self, first: int, end: int) -> slice | np.ndarray:
        """Return where the steps from `first` to before `end` are."""
        length = self.tokens.shape[1]
        start, count = first % length, end - first
        return slice(start, start + count) if start + count <= length else np.arange(first, end) % length

    def move(self, to: np.ndarray, of: np.ndarray) -> None:
        for array in (self.tokens, self.logprobs, self.entropy):
            array[to] = array[of]


class Batch:
    """Rows that are sampled together. Arrays have one entry per row of the cache."""

    def __init__(
        self,
        cache: RowCache,
        *,
        params: SamplingParams,
        eos: Sequence[int],
        stops: StopStrings,
        awaits: Callable[[tuple[int, int]], bool] | None = None,
    ) -> None:
        """Sample into a cache whose rows are free.

        Args:
            awaits: (request index, sample index) of what has ended -> whether a question may come after it, so that its row is to
                be kept for a while; None: none comes.
        """
        self.parked = Parked(cache, awaits)
        self._resumed = -RESUME_STEPS  # the step before which rows went on last
        rows = len(cache.alive)
        self.cache, self._params = cache, params
        self._endings = Endings(params, eos=eos, stops=stops, device=cache.inputs.device)
        self.questions: list[Question | None] = [None] * rows
        self.sample = np.zeros(rows, dtype=np.int64)
        self.seed = np.zeros(rows, dtype=np.int64)
        self.born = np.zeros(rows, dtype=np.int64)  # the step that drew its first token
        self.begun = np.zeros(rows, dtype=np.int64)  # tokens of the response before that one
        self.most = np.zeros(rows, dtype=np.int64)  # tokens that may be drawn for it
        self.step = 0
        self.drawn = Drawn(rows, params.max_tokens)

    @property
    def live(self) -> int:
        """How many rows are in use."""
        return int(self.cache.alive.sum())

    @property
    def busy(self) -> bool:
        """Whether rows are in use, or questions go on."""
        return bool(self.live or self.parked.coming)

    @property
    def used(self) -> int:
        """How many rows are in use or parked."""
        return int(self.cache.used.sum())

    @property
    def free(self) -> int:
        return self.cache.free

    def seat(self, question: Question) -> None:
        """Assign free rows to the question's samples until either run out."""
        assert question.prefix is not None
        for row in self.cache.seat(question.prompt_ids, question.prefix, most=len(question.samples)):
            self._begin(row, question)
        if isinstance(question.prefix, SharedPrefix):
            question.prefix.awaited = bool(question.samples)

    def resume(self) -> list[Question]:
        """Go on with the questions that have come after rows which wait.

        Those whose prompts add a single token do so in the next step; the others, every few steps, in passes of as many rows as these
        may hold.

        Returns those for which there is no row any more, or none with room: they are prefilled as others are.
        """
        if not self.parked.coming:
            return []
        passes = not self.live or self.step - self._resumed >= RESUME_STEPS
        if passes:
            self._resumed = self.step
        going, crowded = self.parked.claim(max_tokens=self._params.max_tokens, passes=passes, steps=bool(self.live))
        going.sort(key=lambda pair: len(pair[1].prompt_ids))
        most = max(1, RESUMED_TOKENS // self.cache.columns)
        for start in range(0, len(going), most):
            rows, questions = zip(*going[start : start + most], strict=True)
            self.cache.resume(np.array(rows), [question.prompt_ids for question in questions])
            for row, question in zip(rows, questions, strict=True):
                self._begin(row, question)
        return crowded

    def _begin(self, row: int, question: Question) -> None:
        """Draw the question's next sample in this row from now on."""
        self.questions[row] = question
        self.sample[row], self.seed[row] = question.samples.popleft()
        self.born[row], self.begun[row] = self.step, question.begun
        self.most[row] = question.max_tokens or self._params.max_tokens

    def advance(self) -> list[Completion]:
        """Draw one token for every row; return the completions that it ended and free their rows."""
        rows, params = self.cache.window.rows, self._params
        self.parked.give_up(self.step)
        logits = self.cache.forward()
        age = self.step - self.born[:rows]
        u = self.cache.on_device(uniforms(self.seed[:rows], age))
        with torch.autocast(logits.device.type, enabled=False):  # drawing is float32 whatever the model ran in
            draw = draw_tokens(
                logits,
                u,
                temperature=params.temperature,
                top_p=params.top_p,
                barred=self._endings.barred(age + self.begun[:rows] < params.min_tokens),
            )
        self.cache.feed(draw.tokens)
        tokens, logprobs, entropy = (drawn.numpy() for drawn in to_host(draw))
        if not np.isfinite(entropy).all():
            raise RlvrError(
                f"The model's logits are not finite (token {int(age[~np.isfinite(entropy)][0])} of a response).",
                "Its weights have diverged, or overflow in this precision: lower the learning rate, or load the model "
                "in float32.",
            )
        self.drawn.add(self.step, tokens, logprobs, entropy)
        self.step += 1
        may_end = self.cache.alive[:rows] & self._endings.possible(tokens, self.most[:rows] - age - 1)
        ended = {int(row): c for row in np.flatnonzero(may_end) if (c := self._completion(int(row))) is not None}
        if ended:
            self._end(ended)
        return [*ended.values()]

    def _end(self, ended: dict[int, Completion]) -> None:
        for row in ended:
            self.questions[row] = None
        if self.parked.awaits:
            self.parked.add({(c.request_index, c.sample_index): row for row, c in ended.items()}, step=self.step)
        else:
            self.cache.release([*ended])

    def arrange(self) -> None:
        """Move rows so that a step computes no free ones, and reads less, see `RowCache.arrange`."""
        to, of = self.cache.arrange()
        if len(to):
            for array in (self.sample, self.seed, self.born, self.begun, self.most):
                array[to] = array[of]
            self.drawn.move(to, of)
            moved = dict(zip(of.tolist(), to.tolist(), strict=True))
            self.parked.move(moved)
            asked = [(row, question) for row, question in enumerate(self.questions) if question is not None]
            self.questions = [None] * len(self.questions)
            for row, question in asked:
                self.questions[moved.get(row, row)] = question

    def _completion(self, row: int) -> Completion | None:
        """Return the completion of a row if its newest token ended it, else None."""
        question, columns = self.questions[row], self.drawn.columns(int(self.born[row]), self.step)
        assert question is not None
        tokens = self.drawn.tokens[row, columns].tolist()
        ending = self._endings.find(tokens, beginning=question.beginning, max_tokens=int(self.most[row]))
        if ending is None:
            return None
        return Completion(
            request_index=question.request_index,
            sample_index=int(self.sample[row]),
            text=ending.text,
            prompt_ids=tuple(question.prompt_ids),
            token_ids=tuple(tokens),
            logprobs=tuple(self.drawn.logprobs[row, columns].tolist()),
            num_prompt_tokens=len(question.prompt_ids),
            num_tokens=len(tokens),
            finish_reason=ending.finish_reason,
            stop_reason=ending.stop_reason,
            mean_entropy=float(self.drawn.entropy[row, columns].sum(dtype=np.float64)) / len(tokens),
        )
