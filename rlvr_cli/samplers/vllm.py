"""vLLM as a sampler, in this process: its paged batching and prefix cache, a seed per sample, verified weight updates.

Enters: a model directory or hub id; then requests, and new weights of the policy that is being trained.
Leaves: completions in the order in which they finish, with the log-probabilities of the distribution sampled from.

One engine request per sample, each with its own seed: vLLM then draws its tokens from a separate generator, so
the tokens depend on the weights, the prompt and the seed, and on the rest of the batch only through matmul rounding.
"""

import logging
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.directory import adapter_settings, base_of, local_directory, tokenizer_of
from rlvr_cli.models.identity import model_path
from rlvr_cli.parallel.worker import visible_as_only
from rlvr_cli.runs.storage.files import os_errors_as_user_errors
from rlvr_cli.samplers.open import UTILIZATION, EngineSettings
from rlvr_cli.samplers.stop_strings import continued, first_stop, prompt_token_ids, response_text
from rlvr_cli.samplers.vllm_process import (
    adapter_options,
    first_lines,
    import_vllm,
    memory_options,
    torch_threads,
    trainer_state_preserved,
)
from rlvr_cli.samplers.weight_check import PROBE_BOUND, Probe, probe_params, probe_prompts, take_probe, verify_weights
from rlvr_cli.types import Completion, MoreRequests, Request, SamplingParams

if TYPE_CHECKING:  # vLLM must be imported before transformers: its error is the clearer one if both fail
    from rlvr_cli.models.policy import Policy

logger = logging.getLogger(__name__)

WEIGHTS_AND_CACHE = ("weights", "kv_cache")  # vLLM's tags of the memory that it gives back when it sleeps
PROBE_PROMPTS = 4
PROBE_TOKENS = 8  # of each answer

HIGHEST_TEMPERATURE = 2.0  # vLLM refuses others
LOWEST_TEMPERATURE = 0.01  # vLLM raises temperatures between 0 and this to this, which changes the distribution


class _Question(NamedTuple):
    """A prompt, and the seeds of its samples."""

    index: int
    prompt: list[int]
    seeds: Sequence[int]
    params: SamplingParams  # of whole responses
    begun: int = 0  # see `types.Request`

    @property
    def of_the_rest(self) -> SamplingParams:
        """Those of what vLLM samples: it takes what a response began with for the prompt."""
        return replace(self.params, min_tokens=max(self.params.min_tokens - self.begun, 0))


class VllmSampler:
    """A vLLM engine in this process.

    Tested on the CPU. The code for CUDA, sleep mode included, follows vLLM's documentation and has not been run yet.

    Args:
        model_path: a directory in the Hugging Face layout with safetensors weights, or a hub id; or the directory of an
            adapter, which is served with its base, and never merged into it.
        dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 on an accelerator, float32 on the CPU.
        max_model_len: prompt plus response, in tokens; None takes the model's own.
        gpu_memory_utilization: share of the GPU's memory for weights and cache. On the CPU it is the cache's share of
            the free memory, at most `CPU_MEMORY_SHARE`.
        seed: of vLLM itself; samples have their own.
        policy_version: of the weights at `model_path`.
        enforce_eager: False captures CUDA graphs, True starts faster; None is False on an accelerator, True on the CPU.
        enable_sleep_mode: let `sleep` free the device's memory. Otherwise, and where vLLM cannot sleep (on the CPU;
            `notes` then says so), `sleep` does nothing.
        lora_rank: of the adapters that `load_weights` takes, in place of weights; 0: it takes weights.

    Attributes:
        seeding: "per-request": a sample's tokens do not depend on what else is in the batch. For run.json.
        notes: decisions that the user should know of, one sentence each.

    Raises:
        RlvrError: vLLM is missing or cannot be imported, there is no such model, or vLLM cannot load it.
    """

    engine = "vllm"
    seeding = "per-request"
    worked_seconds = None
    arrived = ()

    def __init__(
        self,
        model_path: str | Path,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.85,
        seed: int = 0,
        policy_version: int = 0,
        enforce_eager: bool | None = None,
        enable_sleep_mode: bool = False,
        lora_rank: int = 0,
    ) -> None:
        adapter = adapter_settings(model_path)
        weights_of, tokenizer = base_of(model_path) or model_path, tokenizer_of(model_path)
        model = str(local_directory(weights_of) or weights_of)
        options = adapter_options(max(lora_rank, adapter["r"] if adapter is not None else 0))
        with trainer_state_preserved():
            llm_class = import_vllm()
        from vllm.platforms import current_platform

        self.policy_version = policy_version
        # Of a tokenizer that differs from the one that vLLM would load.
        self._tokenizer_folder: tempfile.TemporaryDirectory[str] | None = None
        self.notes: tuple[str, ...] = ()
        self._on_cpu: bool = current_platform.is_cpu()
        self._takes_adapters = lora_rank > 0
        self._adapters = 0  # loaded so far
        self._adapter: Any = None  # vLLM's request for the adapter that is served
        self._adapter_folder: tempfile.TemporaryDirectory[str] | None = None  # of a version that the trainer gave
        memory, note = memory_options(gpu_memory_utilization, on_cpu=self._on_cpu)
        options |= memory
        if note:
            self.notes += (note,)
            logger.warning(note)
        self._can_sleep: bool = (
            enable_sleep_mode
            and current_platform.is_sleep_mode_available()
            and current_platform.is_cumem_allocator_available()
        )
        if self._can_sleep:
            options["enable_sleep_mode"] = True  # only here: where it is not available, vLLM would not start with it
        elif enable_sleep_mode:
            self.notes += ("vLLM has no sleep mode here: it keeps its memory while the policy is trained.",)
        self.dtype = ("float32" if self._on_cpu else "bfloat16") if dtype == "auto" else dtype
        if self.dtype not in PROBE_BOUND:
            raise RlvrError(f"There is no dtype {self.dtype!r}.", f"Choose one of auto, {', '.join(PROBE_BOUND)}.")
        options |= {
            "max_model_len": max_model_len,
            "enforce_eager": self._on_cpu if enforce_eager is None else enforce_eager,
            "seed": seed,
        }
        self.llm: Any = self._load(llm_class, model, tokenizer=tokenizer, options=options)
        self.context_length: int = self.llm.llm_engine.model_config.max_model_len
        self._pending: dict[str, tuple[_Question, int]] = {}  # engine request -> question, sample_index
        self._calls = 0
        self._asleep: tuple[str, ...] = ()  # what of the engine's memory is not mapped: vLLM's tags
        self._weights_error = ""  # why the weights of the engine are unknown; empty if they are known
        self._last_probe: Probe | None = None
        if adapter is not None:
            self._serve_adapter(str(local_directory(model_path)))

    def _load(self, llm_class: Any, model: str, *, tokenizer: str | Path, options: dict[str, Any]) -> Any:
        """Start vLLM with the model. Raises RlvrError if it cannot load it."""
        try:
            with trainer_state_preserved():
                from rlvr_cli.models.tokens.own_tokenizer import corrected_copy

                self._tokenizer_folder = corrected_copy(str(local_directory(tokenizer) or tokenizer), model=model)
                if self._tokenizer_folder is not None:
                    options = options | {"tokenizer": self._tokenizer_folder.name}
                llm = llm_class(
                    model=model,
                    dtype=self.dtype,
                    enable_prefix_caching=True,
                    logprobs_mode="processed_logprobs",
                    load_format="safetensors",  # a pickle is never opened
                    use_tqdm_on_load=False,
                    **options,
                )
                self._threads = torch_threads()  # with a GPU, vLLM uses one: others would only spin
                return llm
        except (ValueError, RuntimeError, OSError, NotImplementedError) as e:
            self._remove_tokenizer()
            raise RlvrError(f"vLLM cannot load {model}: {first_lines(e)}") from e

    def sample(
        self, requests: Sequence[Request], params: SamplingParams, *, more: MoreRequests | None = None
    ) -> Generator[Completion]:
        """Answer every seed of every request; completions come in the order in which they finish.

        Closing the generator, or calling this again, cancels the samples that have not finished.

        Args:
            more: requests that join while others are sampled; they have the indices after those of `requests`.

        Raises:
            RlvrError: a prompt and `max_tokens` exceed `max_model_len`, a temperature that vLLM would change, or
                weights that a failed `load_weights` left in doubt.
        """
        if self.llm is None:
            raise RlvrError("This vLLM engine is closed.")
        if self._weights_error:
            raise RlvrError(
                f"The engine's weights are in doubt: {self._weights_error}", "Load the weights again, or restart."
            )
        check_temperature(params)
        questions, number = self._questions(requests, params), len(requests)

        def coming(*, wait: bool) -> list[_Question]:
            nonlocal number
            joining = more.take(wait=wait) if more else ()
            number += len(joining)
            return self._questions(joining, params, first=number - len(joining))

        yield from self._answer(questions, coming=coming)

    def _questions(self, requests: Sequence[Request], params: SamplingParams, *, first: int = 0) -> list[_Question]:
        """Return what is to be sampled. Raises RlvrError, see `sample`.

        Args:
            first: the index of the first request.
        """
        vocab_size = self.llm.llm_engine.model_config.get_vocab_size()
        prompts = prompt_token_ids(self.llm.get_tokenizer(), requests, vocab_size=vocab_size)
        found = []
        for i, (request, ids) in enumerate(zip(requests, prompts, strict=True), start=first):
            own = replace(params, max_tokens=request.max_tokens or params.max_tokens)
            if len(ids) + own.max_tokens > self.context_length:
                raise RlvrError(
                    f"Prompt {i} has {len(ids)} tokens; with {own.max_tokens} for the response that is "
                    f"{len(ids) + own.max_tokens}, and the engine's max_model_len is {self.context_length}.",
                    "Lower --sampling-max-tokens, shorten the prompt, or raise --max-model-len.",
                )
            found.append(_Question(i, ids, request.seeds, own, request.begun))
        return found

    def load_weights(self, policy: "Policy", policy_version: int) -> None:
        """Switch to the weights of `policy`, and verify that they are served: see `weight_check.verify_weights`.

        Raises:
            RlvrError: the weights do not fit the engine's model, or the engine does not serve them.
        """
        self._drop_pending()
        self._wake("weights")
        self._weights_error = "the last load failed midway."
        with trainer_state_preserved():
            try:
                if self._takes_adapters:
                    self._load_adapter(policy)
                else:
                    # With tied embeddings the output layer is passed under its own name too: the CPU build keeps a packed
                    # copy of it, which stays stale if only the embeddings are passed (as when vLLM reads a saved model).
                    weights = list(policy.weights_for_engine().items())
                    self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            except (ValueError, RuntimeError, KeyError, AttributeError, AssertionError) as e:
                raise RlvrError(
                    f"These weights do not fit the engine's model: {first_lines(e)}",
                    "The policy must have the architecture that the engine was started with.",
                ) from e
        self._wake("kv_cache")  # after the weights: both copies of them and the cache need not fit at once
        with trainer_state_preserved():
            self._reset_prefix_cache()
        self._weights_error = "the engine does not serve the weights that were loaded."
        probe = self._probe(policy)
        verify_weights(
            probe,
            self._last_probe,
            precisions=(self.dtype, str(policy.dtype).removeprefix("torch.")),
            version=policy_version,
            served_version=self.policy_version,
            hint="--engine transformers samples from the trainer's own weights.",
        )
        self._last_probe, self._weights_error, self.policy_version = probe, "", policy_version

    def sleep(self) -> None:
        """Free the device's memory until the next `load_weights`; cancel unfinished samples.

        The weights are discarded (vLLM's level 2): the trainer has newer ones. If it gives adapters only, they wait in the
        host's memory (level 1).
        """
        if not self._can_sleep or self._asleep or self.llm is None:
            return
        self._drop_pending()
        with trainer_state_preserved():
            self.llm.sleep(level=1 if self._takes_adapters else 2)
        self._asleep = WEIGHTS_AND_CACHE
        self._weights_error = "it slept, and its weights were discarded."

    def close(self) -> None:
        """Free the engine's memory; closing twice is allowed."""
        if self.llm is None:
            return
        self._drop_pending()
        self.llm.llm_engine.engine_core.shutdown()
        self.llm, self._asleep = None, ()
        self._remove_tokenizer()
        if self._adapter_folder is not None:
            self._adapter_folder.cleanup()

    def _load_adapter(self, policy: "Policy") -> None:
        """Serve the adapter of `policy` from now on, and forget the one before."""
        with os_errors_as_user_errors(Path(tempfile.gettempdir())):
            folder = tempfile.TemporaryDirectory(prefix="rlvr-adapter-")
            policy.write_adapter(Path(folder.name))
        self._serve_adapter(folder.name)
        before, self._adapter_folder = self._adapter_folder, folder
        if before is not None:
            before.cleanup()

    def _serve_adapter(self, directory: str) -> None:
        """Load the adapter in a directory, under a name that no other had: vLLM knows adapters, and cached keys, by their names."""
        from vllm.lora.request import LoRARequest

        engine, before = self.llm.llm_engine, self._adapter
        self._adapters += 1
        self._adapter = LoRARequest(f"policy-{self._adapters}", self._adapters, directory)
        if before is not None:
            engine.remove_lora(before.lora_int_id)
        engine.add_lora(self._adapter)

    def _remove_tokenizer(self) -> None:
        if self._tokenizer_folder is not None:
            self._tokenizer_folder.cleanup()

    def _answer(
        self,
        questions: Sequence[_Question],
        *,
        coming: Callable[..., Sequence[_Question]] = lambda wait: (),
        ignore_eos: bool = False,
    ) -> Generator[Completion]:
        """Yield a completion for each seed of each question, in the order in which they finish.

        Args:
            coming: those that join; `coming(wait=True)` waits for the next ones, and returns none if no more will come.
        """
        self._drop_pending()
        self._calls += 1
        call = self._calls
        try:
            self._ask(questions, ignore_eos=ignore_eos)
            while call == self._calls:
                self._ask(coming(wait=not self._pending), ignore_eos=ignore_eos)
                if not self._pending:
                    break
                with trainer_state_preserved(threads=self._threads):
                    outputs = self.llm.llm_engine.step()
                for output in outputs:
                    if sample := self._pending.pop(output.request_id, None):  # else canceled meanwhile
                        yield self._completion(output, *sample)
        finally:
            if call == self._calls:
                self._drop_pending()

    def _ask(self, questions: Sequence[_Question], *, ignore_eos: bool) -> None:
        """Add an engine request for each seed of each question."""
        from vllm.inputs import tokens_input

        for question in questions:
            params = question.of_the_rest
            for j, seed in enumerate(question.seeds):
                name = f"{self._calls}-{question.index}-{j}"
                self._pending[name] = (question, j)
                self.llm.llm_engine.add_request(
                    name,
                    tokens_input(question.prompt),
                    _vllm_params(params, self._fold(seed), ignore_eos=ignore_eos),
                    lora_request=self._adapter,
                )

    def _fold(self, seed: int) -> int:
        """Return the seed for vLLM: all 63 bits, or on the CPU a hash of them with 32 bits.

        torch's CPU generators (MT19937) use only the lower 32 bits, so that 5 and 2**32 + 5 would draw the same.
        """
        return (seed * 0x9E3779B97F4A7C15 % 2**64) >> 32 if self._on_cpu else seed

    def _drop_pending(self) -> None:
        if self._pending:
            self.llm.llm_engine.abort_request(list(self._pending))
            self._pending.clear()

    def _completion(self, output: Any, question: _Question, sample_index: int) -> Completion:
        answer, min_tokens = output.outputs[0], question.of_the_rest.min_tokens
        if answer.finish_reason not in ("stop", "length"):
            where = f"sample {sample_index} of prompt {question.index}"
            raise RlvrError(f"vLLM ended {where} with {answer.finish_reason!r}.")
        token_ids = tuple(answer.token_ids)
        assert tuple(answer.logprobs.token_ids) == token_ids, (answer.logprobs.token_ids, token_ids)
        # Decode here, so that every engine gives the same text. vLLM decodes the response as a continuation of the
        # prompt, which adds a leading space with some tokenizers, and it hides bytes that form no character.
        tokenizer = self.llm.get_tokenizer()
        text, stop_reason = response_text(tokenizer, token_ids), None
        if answer.finish_reason == "stop":
            stop_reason = "eos"  # vLLM reports None, or the id if a model has several EOS tokens
            if isinstance(answer.stop_reason, str):
                stop_reason = answer.stop_reason
                protected = response_text(tokenizer, token_ids[:min_tokens]).rstrip("\ufffd") if min_tokens else ""
                found = first_stop(text, [stop_reason], start=len(protected))
                text = text[: found[1]] if found else answer.text
        completion = Completion(
            request_index=question.index,
            sample_index=sample_index,
            text=text,
            prompt_ids=tuple(output.prompt_token_ids),
            token_ids=token_ids,
            logprobs=tuple(answer.logprobs.logprobs),
            num_prompt_tokens=len(output.prompt_token_ids),
            num_tokens=len(token_ids),
            finish_reason=answer.finish_reason,
            stop_reason=stop_reason,
            mean_entropy=None,
        )
        if question.begun:
            return continued(completion, tokenizer, question.params, begun=question.begun)
        return completion

    def _probe(self, policy: "Policy") -> Probe:
        # Longer than a cache block, so that a prefix cache of the old weights would be used, and found.
        block = self.llm.llm_engine.vllm_config.cache_config.block_size
        length = min(block + 32, self.context_length - PROBE_TOKENS)
        vocabulary = min(policy.vocabulary_size, len(self.llm.get_tokenizer()))
        prompts = probe_prompts(vocabulary, count=PROBE_PROMPTS, length=length)
        questions = [_Question(i, ids, (0,), probe_params(PROBE_TOKENS)) for i, ids in enumerate(prompts)]
        return take_probe(policy, self._answer(questions, ignore_eos=True))

    def _wake(self, tag: str) -> None:
        if tag not in self._asleep:
            return
        import torch

        torch.cuda.empty_cache()  # memory that the trainer has freed but its allocator still holds
        with trainer_state_preserved():
            try:
                self.llm.wake_up(tags=[tag])
            except RuntimeError as e:
                raise RlvrError(
                    f"vLLM did not get the memory for its {tag} back: {first_lines(e)}",
                    "The trainer, or another process, has it: lower --gpu-memory-utilization.",
                ) from e
        self._asleep = tuple(other for other in self._asleep if other != tag)

    def _reset_prefix_cache(self) -> None:
        if not self.llm.reset_prefix_cache():  # else old keys and values are used
            raise RlvrError("vLLM did not reset its prefix cache.")


def check_temperature(params: SamplingParams) -> None:
    """Raise RlvrError if vLLM would refuse the temperature, or change it."""
    if params.temperature > HIGHEST_TEMPERATURE:
        raise RlvrError(
            f"vLLM samples at temperatures up to {HIGHEST_TEMPERATURE}, not at {params.temperature}.",
            "Lower --sampling-temperature, or use --engine transformers.",
        )
    if 0 < params.temperature < LOWEST_TEMPERATURE:
        raise RlvrError(
            f"vLLM samples at {LOWEST_TEMPERATURE} when asked for temperature {params.temperature}.",
            f"Use 0 (greedy) or at least {LOWEST_TEMPERATURE}.",
        )


def _vllm_params(params: SamplingParams, seed: int, *, ignore_eos: bool) -> Any:
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as EngineParams

    return EngineParams(
        temperature=params.temperature,
        top_p=params.top_p,
        max_tokens=params.max_tokens,
        min_tokens=min(params.min_tokens, params.max_tokens),
        stop=list(params.stop),
        include_stop_str_in_output=True,
        ignore_eos=ignore_eos,
        seed=seed,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def open_engine(settings: EngineSettings) -> VllmSampler:
    """Open the engine on the first visible GPU, or on the CPU. Raises RlvrError if it is to compute on another GPU."""
    if settings.device.startswith("cuda:") and settings.device != "cuda:0":
        raise RlvrError(
            f"vLLM computes on the first visible GPU, not on {settings.device}.",
            f"Make that one the first: CUDA_VISIBLE_DEVICES={visible_as_only(settings.device)}, and leave --device out.",
        )
    return VllmSampler(
        model_path(settings.model),
        dtype=settings.resolved_dtype,
        max_model_len=settings.max_model_len,
        gpu_memory_utilization=settings.gpu_memory_utilization or UTILIZATION,
        seed=settings.seed,
        enable_sleep_mode=settings.sleep_mode,
        lora_rank=settings.lora_rank,
    )
