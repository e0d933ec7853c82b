"""The embedded engine: requests -> completions, on any decoder-only `transformers` model with ordinary attention.

Continuous batching (`batch`) over a preallocated key-value cache (`cache`). Each prompt is prefilled once, whatever the number of
its samples; when rows finish, waiting samples take their place. A sample's tokens depend only on the weights, its
prompt and its seed: every draw is a pure function of (seed, position), so the other rows of the batch, their number and
their order do not matter, up to the rounding of matrix products.

Decoding steps run in `decode_step.DecodeStep` if it supports the model, checked against the model at the start; on a
CUDA device they run as the recorded graphs of `cuda_graphs`. Otherwise the model itself runs them, and `notes` says
why.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Literal, NamedTuple

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.compute.device import dtype_name, out_of_memory_as_user_error
from rlvr_cli.models.policy import Policy
from rlvr_cli.process import memory_limit
from rlvr_cli.samplers.embedded.attention import ATTENTION
from rlvr_cli.samplers.embedded.batch import Batch
from rlvr_cli.samplers.embedded.cache import RowCache, Workspace, make_slots
from rlvr_cli.samplers.embedded.cuda_graphs import COLUMNS, first_sentence
from rlvr_cli.samplers.embedded.decode_step import DecodeStep, unsupported_reason
from rlvr_cli.samplers.embedded.prefill import Prefix, prefill
from rlvr_cli.samplers.embedded.questions import PARKED_STEPS, TAKEN_OUT_SHARE, Question, common_token_ids
from rlvr_cli.samplers.embedded.shared import Block
from rlvr_cli.samplers.stop_strings import StopStrings, prompt_token_ids
from rlvr_cli.samplers.weight_check import Probe, probe_params, probe_prompts, take_probe, verify_weights
from rlvr_cli.types import Completion, MoreTurns, Request, SamplingParams

logger = logging.getLogger(__name__)

# Model types that tell `attention._attend` their sliding window.
_WINDOWED = ("gemma2", "gemma3_text", "mistral", "phi3")
_MAX_ROWS = 256  # more rows hardly raise the rate: the fixed cost of a step is small by then
_PREFILL_TOKENS = 4096  # prompt tokens per prefill, padding included
_HELD_BY_COMMON = 4  # times as many keys and values may a prefill hold, of tokens that prompts begin with and that it does not compute
# More padding costs more than another prefill: on a CPU, on other devices.
_PADDING_TOKENS, _PADDING_TOKENS_ELSEWHERE = 128, 2048
# The share of used rows under which waiting samples get rows: on a CPU, on other devices, where a prefill costs several steps.
_REFILL_BELOW, _REFILL_BELOW_ELSEWHERE = 0.95, 0.8
_SHARED_TOKENS = 256  # copies of a prompt's tokens, on average, that one copy must save to be faster
_GATHER_SECONDS = 0.03  # how long a completion waits for others before it is yielded
_COMPACT_BELOW = 0.8  # share of live rows under which moving rows costs less than computing dead ones
_KEPT_BYTES = 128 * 2**20  # the largest workspace that is kept for the next call on a CPU
# The memory of prefixes that rows share, of what they take without padding and without those of rows that ended.
_PADDED_SHARE = 1.25
_CHECKED = ([3, 1, 4, 1, 5, 9], [3, 7, 1])  # prompts on which steps are compared with a plain forward pass
_PROBE_PROMPTS, _PROBE_LENGTH, _PROBE_TOKENS = 2, 8, 4  # few, since the probe runs after every update


class _Plan(NamedTuple):
    """A batch."""

    rows: int
    columns: int
    questions: deque[Question]
    shared_bytes: int  # for prompts that rows share


class _Joining:
    """Requests that join a running batch.

    Args:
        more: where they come from.
        questions: makes questions of requests: `questions(requests, first=)`.
        first: the index of the first one.
    """

    def __init__(self, more: MoreTurns, questions: Callable[..., list[Question]], *, first: int) -> None:
        self._more, self._questions, self._first = more, questions, first
        self.most_tokens = more.most_tokens + PARKED_STEPS
        self.awaits = more.awaits

    def add(self, upcoming: deque[Question], batch: Batch, *, wait: bool = False) -> bool:
        """Add those that have come, to the batch if they go on in it; with `wait`, those that come next. Returns whether there are any."""
        requests = self._more.take(wait=wait)
        if not requests:
            return False
        for question in self._questions(requests, first=self._first):
            (batch.parked.coming if batch.parked.expects(question) else upcoming).append(question)
        self._first += len(requests)
        return True


class TransformersSampler:
    """Samples in this process, directly from the weights that are trained: nothing is copied.

    While completions are being consumed the model may be used for other things (its mode and its attention are restored
    before each one is yielded), but its weights must not change. Between calls only tables of the tokenizer and the
    workspace of the last batch are kept (on a CPU if it is small), with the graphs recorded on it, and no results.

    Attributes:
        seeding: a sample's tokens do not depend on what else is in the batch. For run.json.
        notes: why sampling from this model is slower than from others, one sentence each.
    """

    engine: Literal["transformers"] = "transformers"
    seeding = "per-request"
    worked_seconds = None
    arrived = ()

    def __init__(
        self,
        policy: Policy,
        *,
        max_batch_size: int | None = None,
        kv_memory_bytes: int | None = None,
        cuda_graphs: bool = True,
        sleep_mode: bool = False,
        policy_version: int = 0,
    ) -> None:
        """Check on a few tokens that the model gives the same logits through the engine's cache as without it.

        Args:
            policy: on the device to sample on. It is shared, not copied, and computes in its `compute_dtype`.
            max_batch_size: samples in the batch at once, by default 256; fewer if memory limits them.
            kv_memory_bytes: memory for the keys, values and logits of a batch; by default a quarter of the memory that
                this process may use (CPU), or half of what is free (CUDA) when `sample` is called.
            cuda_graphs: on CUDA, run steps in fixed shapes, each recorded once and replayed (`cuda_graphs.py`).
            sleep_mode: on CUDA, give the workspace back in `sleep`.

        Raises:
            RlvrError: the model is of a kind that this engine cannot run.
        """
        assert max_batch_size is None or max_batch_size > 0, max_batch_size
        self.policy_version = policy_version
        self._policy, self._tokenizer = policy, policy.tokenizer
        self._max_rows = max_batch_size or _MAX_ROWS
        self._kv_memory_bytes = kv_memory_bytes
        self._eos = policy.eos_token_ids
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._weights_error = ""  # why the weights of the model are unknown; empty if they are known
        self._last_probe: Probe | None = None
        self._spare: Workspace | None = None  # of the last batch, for the next one to use
        self._sleep_mode = sleep_mode and policy.device.type == "cuda"
        self._step_rejection = ""  # why `DecodeStep` must not replace the model; empty if it may
        self._shares = policy.device.type == "cpu"  # whether samples of a question may read one copy of its prompt
        self._refill_below = _REFILL_BELOW if policy.device.type == "cpu" else _REFILL_BELOW_ELSEWHERE
        self._fixed = cuda_graphs and policy.device.type == "cuda"  # whether steps run in fixed shapes
        self.notes: tuple[str, ...] = ()
        self._vocab_size, self._empty_prefix = self._check()

    @property
    def context_length(self) -> int | None:
        """As `types.JoinableSampler.context_length`."""
        return self._policy.context_length

    @property
    def context_note(self) -> str:
        """As `models.policy.Policy.context_note`."""
        return self._policy.context_note

    def sample(
        self, requests: Sequence[Request], params: SamplingParams, *, more: MoreTurns | None = None
    ) -> Generator[Completion]:
        """Answer every seed of every request; completions come in the order in which they finish.

        A consumer may stop early: closing the generator frees its memory.

        Args:
            more: requests that join while rows become free; they have the indices after those of `requests`.

        Raises:
            RlvrError: before anything is sampled, a prompt that is empty or that leaves no room in the model's context
                for `max_tokens` more, or weights that a failed `load_weights` left in doubt; while sampling, logits
                that are not finite.
        """
        assert params.max_tokens > 0, params
        if params.min_tokens > params.max_tokens + min((request.begun for request in requests), default=0):
            raise RlvrError(
                f"The minimum of {params.min_tokens} tokens per response exceeds the maximum of {params.max_tokens}.",
                "Make --sampling-min-tokens at most --sampling-max-tokens.",
            )
        if self._weights_error:
            raise RlvrError(
                f"The engine's weights are in doubt: {self._weights_error}", "Load the weights again, or restart."
            )
        questions = self._questions(requests, params)
        if not more and self._shares and self._may_step():
            _share(questions)
        # Longest first: neighbors then need similar numbers of columns, and the first cache is the widest one.
        questions.sort(key=lambda question: (-question.kept, -len(question.prompt_ids)))
        stops = self._stop_strings(params.stop)
        joining = _Joining(more, partial(self._questions, params=params), first=len(requests)) if more else None
        return self._stream(deque(questions), params, eos=self._eos, stops=stops, joining=joining)

    def _questions(self, requests: Sequence[Request], params: SamplingParams, *, first: int = 0) -> list[Question]:
        """Return what is to be sampled. Raises RlvrError, see `sample`.

        Args:
            first: the index of the first request.
        """
        prompts = prompt_token_ids(self._tokenizer, requests, vocab_size=self._vocab_size)
        commons = common_token_ids(self._tokenizer, requests, prompts)
        limit = self.context_length
        for index, (request, ids) in enumerate(zip(requests, prompts, strict=True), start=first):
            most = request.max_tokens or params.max_tokens
            if limit is not None and len(ids) + most > limit:
                raise RlvrError(
                    f"Question {request.name or index}: its prompt has {len(ids)} tokens and up to {most} are to be "
                    f"sampled, but the model's context holds {limit}{self.context_note}.",
                    f"Set --sampling-max-tokens to at most {limit - len(ids)}, or leave the question out."
                    if len(ids) < limit
                    else "Leave the question out, or use a model with a longer context.",
                )
        return [
            Question(
                index,
                ids,
                deque(enumerate(request.seeds)),
                common=common,
                begun=request.begun,
                max_tokens=request.max_tokens,
                after=request.after,
            )
            for index, (request, ids, common) in enumerate(zip(requests, prompts, commons, strict=True), start=first)
            if request.seeds
        ]

    def load_weights(self, policy: Policy, policy_version: int) -> None:
        """Switch to the weights of `policy`, and verify that they are served: see `weight_check.verify_weights`.

        The weights are shared if `policy` has the engine's own model, else copied.

        Raises:
            RlvrError: the weights do not fit the engine's model, or the engine does not serve them.
        """
        if policy.model is not self._policy.model:
            self._weights_error = "the last load failed midway."
            try:
                self._policy.load_engine_weights(policy.weights_for_engine())
            except RuntimeError as e:
                first_lines = " ".join(line.strip() for line in str(e).splitlines()[:2])
                raise RlvrError(
                    f"These weights do not fit the engine's model: {first_lines}",
                    "The policy must have the architecture that the engine was started with.",
                ) from e
        self._weights_error = "the engine does not serve the weights that were loaded."
        prompts = probe_prompts(
            min(policy.vocabulary_size, len(self._tokenizer)), count=_PROBE_PROMPTS, length=_PROBE_LENGTH
        )
        questions = deque(Question(i, ids, deque([(0, 0)])) for i, ids in enumerate(prompts))
        answers = self._stream(questions, probe_params(_PROBE_TOKENS), eos=(), stops=self._stop_strings(()))
        probe = take_probe(policy, answers, autocast=True)
        verify_weights(
            probe,
            self._last_probe,
            precisions=[dtype_name(self._policy.compute_dtype), dtype_name(policy.compute_dtype)],
            version=policy_version,
            served_version=self.policy_version,
            hint="Something keeps old weights, or changes the model when it reads one token at a time: a hook, a "
            "patch, or another cache. Remove it, or use --engine vllm.",
        )
        self._last_probe, self._weights_error, self.policy_version = probe, "", policy_version

    def sleep(self) -> None:
        """Give the workspace back if so asked. The weights belong to the trainer."""
        if self._sleep_mode:
            self._spare = None

    def close(self) -> None:
        """Free the workspace that is kept between calls of `sample`; the model belongs to the caller."""
        self._spare = None

    def _stop_strings(self, stop: tuple[str, ...]) -> StopStrings:
        if stop not in self._stops:
            self._stops[stop] = StopStrings(self._tokenizer, stop, vocab_size=self._vocab_size)
        return self._stops[stop]

    def _stream(
        self,
        waiting: deque[Question],
        params: SamplingParams,
        *,
        eos: Sequence[int],
        stops: StopStrings,
        joining: "_Joining | None" = None,
    ) -> Generator[Completion]:
        version = self.policy_version
        while waiting:
            plan = self._plan(waiting, params, most_tokens=joining.most_tokens if joining else 0)
            rows, columns, upcoming = plan.rows, plan.columns, plan.questions
            longest = max(len(question.prompt_ids) for question in upcoming) + params.max_tokens
            ready: deque[Question] = deque()
            with self._sampling():
                workspace = self._workspace(rows, columns, positions=max(columns, longest))
                cache = RowCache(self._policy, workspace, rows=rows, columns=columns)
                awaits = joining.awaits if joining and workspace.step else None
                batch = Batch(cache, params=params, eos=eos, stops=stops, awaits=awaits)
            while upcoming or ready or batch.busy or (joining and joining.add(upcoming, batch, wait=True)):
                done: list[Completion] = []
                due = math.inf
                with self._sampling():
                    while time.monotonic() < due and (upcoming or ready or batch.busy):
                        if joining:
                            joining.add(upcoming, batch)
                        self._admit(batch, ready, upcoming, shared_bytes=plan.shared_bytes)
                        done += batch.advance()
                        if done and due == math.inf:  # those that finish at almost the same time are yielded together
                            due = time.monotonic() + (0 if joining else _GATHER_SECONDS)
                if cache.recording_failure:
                    self._note(f"Some steps run without CUDA graphs, which is slower: {cache.recording_failure}.")
                yield from done
                assert self.policy_version == version, "the weights changed while completions were being consumed"
            del batch, cache  # frees their memory before the next batch is planned
            on_cuda = workspace.device.type == "cuda"
            if not on_cuda and workspace.nbytes > _KEPT_BYTES:
                workspace.take(None)
            if on_cuda or workspace.nbytes <= _KEPT_BYTES:
                self._spare = workspace
            del workspace

    def _plan(self, waiting: deque[Question], params: SamplingParams, *, most_tokens: int = 0) -> _Plan:
        """Return the next batch, whose questions are removed from `waiting`.

        The longest question determines the columns, and `most_tokens` those of questions that join later. If they are so many
        that memory limits the rows, questions that need fewer than half of the columns wait for a later batch with fewer
        columns and more rows.
        """
        longest = max(waiting[0].kept + params.max_tokens, most_tokens)
        columns = longest + max(16, longest // 8)  # spare ones, so that moving back to the beginning is rare
        columns += -columns % (COLUMNS if self._fixed else 8)  # CUDA kernels want masks aligned
        cache = sum(t.shape[0] * t.shape[2] * t.element_size() for pair in self._empty_prefix for t in pair)
        own_bytes = columns * cache + 5 * 4 * self._vocab_size  # logits, and the memory to draw from them
        own_bytes += int(TAKEN_OUT_SHARE * columns * cache) if most_tokens else 0
        shares = [len(question.prompt_ids) / len(question.samples) for question in waiting if question.shares]
        row_bytes = own_bytes + int(_PADDED_SHARE * cache * max(shares, default=0))
        budget = self._kv_memory_bytes or self._memory_budget()
        affordable = budget // row_bytes
        if affordable == 0:
            raise RlvrError(
                f"One sample of question {waiting[0].request_index} may take {row_bytes / 2**20:.0f} MiB of memory "
                f"({longest} tokens), but only {budget / 2**20:.0f} MiB are set aside for sampling.",
                "Lower --sampling-max-tokens, free memory, or use --engine vllm.",
            )
        samples = sum(len(question.samples) for question in waiting)
        limited = affordable < min(self._max_rows, samples)
        upcoming: deque[Question] = deque()
        while waiting and (not limited or most_tokens or 2 * (waiting[0].kept + params.max_tokens) >= longest):
            upcoming.append(waiting.popleft())
        samples = sum(len(question.samples) for question in upcoming)
        rows = min(self._max_rows, affordable, samples)
        return _Plan(rows, columns, upcoming, budget - rows * own_bytes)

    def _workspace(self, rows: int, columns: int, *, positions: int) -> Workspace:
        """Return a workspace with at least this many rows, columns and positions, whose step has the policy's weights.

        The last batch's is used again if it is large enough: new pages from the operating system cost a short call a
        tenth of its time, and recording graphs on CUDA costs seconds. Its memory always holds finite numbers: a masked
        column still enters the weighted sum, with weight 0, and 0 x NaN is NaN.
        """
        device = self._policy.device
        may_step = self._may_step()
        spare, self._spare = self._spare, None
        if spare is not None and spare.rows >= rows and spare.columns >= columns and spare.device == device:
            if not may_step:
                spare.take(None)
            elif spare.step is None or spare.step.positions < positions or not spare.step.refresh(self._policy):
                spare.take(self._new_step(max(spare.columns, positions)), fixed=self._fixed)
            elif (spare.fixed_step is not None) != self._fixed:
                spare.take(spare.step, fixed=self._fixed)
            return spare
        del spare  # frees its memory before more is taken
        slots = make_slots(self._empty_prefix, rows=rows, columns=columns, device=device)
        return Workspace(slots, step=self._new_step(positions) if may_step else None, fixed=self._fixed)

    def _admit(self, batch: Batch, ready: deque[Question], upcoming: deque[Question], *, shared_bytes: int) -> None:
        """Go on in parked rows; once so many rows are free that a prefill is worth it, assign them to waiting samples.

        No more prompts are prefilled while those that rows share take `shared_bytes` or more.
        If too few wait, or long rows stand among short ones, the rows that are used are moved.
        """
        if ready or upcoming or batch.parked.lacks_rows:
            batch.parked.take_out(batch.step)
        upcoming.extendleft(batch.resume())
        if not batch.live or batch.used <= self._refill_below * len(batch.cache.alive):
            while batch.free and (ready or upcoming):
                if not ready:
                    if batch.live and batch.cache.shared_bytes >= shared_bytes:
                        break
                    ready.extend(self._prefill(batch.cache, upcoming, batch.free))
                question = ready[0]
                batch.seat(question)
                if not question.samples:
                    question.prefix = None
                    ready.popleft()
        if batch.used < _COMPACT_BELOW * batch.cache.window.rows or batch.cache.scattered:
            batch.arrange()

    def _prefill(self, cache: RowCache, upcoming: deque[Question], free: int) -> list[Question]:
        """Prefill the next questions in one pass: enough for `free` rows, or as many as a pass may hold.

        They begin with the same tokens, of which the pass has only the keys and values. Those that would need much padding, on the
        right, are left for the next pass.
        """
        questions = [upcoming.popleft()]
        common = questions[0].common
        length = known = len(questions[0].prompt_ids) - len(common)  # of the longest, and of all
        padding = _PADDING_TOKENS if self._policy.device.type == "cpu" else _PADDING_TOKENS_ELSEWHERE
        while upcoming and sum(len(q.samples) for q in questions) < free and upcoming[0].common == common:
            length = max(length, len(upcoming[0].prompt_ids) - len(common))
            known += len(upcoming[0].prompt_ids) - len(common)
            rows = len(questions) + 1
            if max(rows * length, rows * (len(common) + length) // _HELD_BY_COMMON) > _PREFILL_TOKENS:
                break
            if rows * length - known > padding:
                break
            questions.append(upcoming.popleft())
        prefixes = cache.prefill([question.prompt_ids[:-1] for question in questions], common=common)
        for question, prefix in zip(questions, prefixes, strict=True):
            question.prefix = prefix
        if sharing := [question for question in questions if question.shares]:
            block = Block([prefix for question, prefix in zip(questions, prefixes, strict=True) if question.shares])
            for question, shared in zip(sharing, block.prefixes, strict=True):
                question.prefix = shared
        return questions

    @contextmanager
    def _inference(self) -> Iterator[None]:
        """Run the model without gradients and dropout, on its device; restore its state and the current device on exit."""
        policy = self._policy
        with policy.on_its_device(), policy.evaluating(), torch.inference_mode(), policy.autocast():
            yield

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """Like `_inference`, with this engine's attention; too little memory on the device is a user error."""
        memory = out_of_memory_as_user_error(
            "The device ran out of memory while sampling.",
            "Lower --max-batch-size or --sampling-max-tokens, or free memory on the device.",
        )
        with memory, self._policy.attention_function(ATTENTION), self._inference():
            yield

    def _may_step(self) -> bool:
        """Return whether a `DecodeStep` runs the steps; if not, the model itself has to, and a note says why."""
        reason = self._step_rejection or unsupported_reason(self._policy)
        dtype = self._policy.compute_dtype
        copies = self._policy.num_parameters * dtype.itemsize if dtype != self._policy.dtype else 0
        if not reason and copies > self._memory_budget() // 2:
            reason = f"{copies / 2**30:.1f} GiB for its weights in {dtype_name(dtype)} leave too little memory"
        if reason:
            self._note(f"Sampling is slower than it could be, since the model's own code runs each step: {reason}.")
        return not reason

    def _new_step(self, positions: int) -> DecodeStep:
        return DecodeStep(self._policy, dtype=self._policy.compute_dtype, positions=positions)

    def _memory_budget(self) -> int:
        """Return the bytes that a batch may take: half of a CUDA device's free memory, else a quarter of this process's.

        What is kept from the last batch counts as free, so that a batch does not depend on those before it.
        """
        device = self._policy.device
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            return (free + (self._spare.nbytes if self._spare is not None else 0)) // 2
        return memory_limit() // 4

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes += (note,)
            logger.warning(note)

    def _check(self) -> tuple[int, Prefix]:
        """Compare the logits after two short prompts and one more token, step by step, with those of a plain forward pass.

        Returns:
            The vocabulary size of the logits, and an empty prefix with the shapes and dtypes of the model's keys and
            values.

        Raises:
            RlvrError: they differ, or the model's cache declares anything but ordinary keys and values.
        """
        unsupported = RlvrError(
            f"The embedded engine cannot sample from {type(self._policy.model).__name__}: it runs decoder-only models with "
            f"ordinary attention (no encoder or recurrent state; a sliding window only in {', '.join(_WINDOWED)}).",
            "Use --engine vllm. Without it, rlvr sft trains the model on a file of traces, without --eval-dataset.",
        )
        if not _is_supported(self._policy) or not self._policy.accepts_attention(ATTENTION):
            raise unsupported
        with self._inference():
            ids = [torch.tensor([prompt], device=self._policy.device) for prompt in _CHECKED]
            plain = torch.stack([self._policy.forward(input_ids=one).logits[0, -2:].float() for one in ids], dim=1)
        exact = self._policy.compute_dtype.itemsize >= 4
        with self._sampling():
            try:
                nothing = [(keys[:, :0], values[:, :0]) for keys, values in prefill(self._policy, [[0]])[0]]
            except NotImplementedError as error:  # of `attention`
                raise unsupported from error
            gap = partial(self._gap, plain, nothing)  # plain: (steps, prompts, vocabulary)
            if gap() > (1e-2 if exact else 1e-1):
                raise unsupported
            self._check_step(gap, bound=1e-4 if exact else 5e-2)
            return plain.shape[-1], nothing

    def _gap(
        self,
        plain: torch.Tensor,
        nothing: Prefix,
        *,
        step: DecodeStep | None = None,
        fixed: bool = False,
        shared: bool = False,
    ) -> float:
        """Return the largest difference from the plain logits, relative to the largest plain logit.

        Both steps have the same shape, so that the second one is a replay where steps are recorded.

        Raises:
            RuntimeError: a step cannot be recorded.
        """
        # ones would show if the mask were ignored
        slots = make_slots(nothing, rows=len(_CHECKED), columns=8, value=1.0)
        cache = RowCache(self._policy, Workspace(slots, step=step, fixed=fixed))
        prefixes = cache.prefill([prompt[:-2] for prompt in _CHECKED], common=(_CHECKED[0][0],))
        for prompt, prefix in zip(_CHECKED, Block(prefixes).prefixes if shared else prefixes, strict=True):
            cache.seat(prompt[:-1], prefix, most=1)
        first = cache.forward().clone()
        if cache.recording_failure:
            raise RuntimeError(cache.recording_failure)
        cache.feed(torch.tensor([prompt[-1] for prompt in _CHECKED], device=self._policy.device))
        return float((torch.stack((first, cache.forward())) - plain).abs().max() / plain.abs().max())

    def _check_step(self, gap: Callable[..., float], *, bound: float) -> None:
        """Do without the faster step, or without its graphs, if they fail or their logits differ by more than `bound`."""
        step = self._new_step(8) if self._may_step() else None
        if step is not None and gap(step=step) > bound:
            self._step_rejection, step = "the faster one gives different logits", None
            self._may_step()  # notes it
        if step is not None and self._shares and gap(step=step, shared=True) > bound:
            self._shares = False
            self._note("Each sample has a copy of its prompt's keys and values: reading one gives different logits.")
        if step is not None and self._fixed:
            try:
                failure = "they give different logits" if gap(step=step, fixed=True) > bound else ""
            except RuntimeError as error:
                failure = first_sentence(error)
            if failure:
                self._fixed = False
                self._note(f"Sampling is slower than it could be, since CUDA graphs do not work here: {failure}.")


def _share(questions: Sequence[Question]) -> None:
    """Let the samples of a question read one copy of its prompt, if that makes steps of all of them faster."""
    saved = sum((len(question.samples) - 1) * (len(question.prompt_ids) - 1) for question in questions)
    if saved >= _SHARED_TOKENS * len(questions):
        for question in questions:
            question.shares = len(question.samples) > 1 < len(question.prompt_ids)


def _is_supported(policy: Policy) -> bool:
    """Return whether the model declares causal attention that `attention` computes in all its layers and accepts `position_ids`."""
    if not policy.is_decoder:
        return False
    if not {"position_ids", "past_key_values"} <= set(signature(policy.model.forward).parameters):
        return False
    kinds = {type(layer) for layer in DynamicCache(config=policy.config).layers}
    windows = {DynamicSlidingWindowLayer} if policy.config.model_type in _WINDOWED else set()
    return kinds <= {DynamicLayer, *windows}
