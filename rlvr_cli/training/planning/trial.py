"""A trial of what training does, on the built-in tiny model: one update, sampling, loading weights, grading.

Enters: a device, and an engine. Leaves: what was measured, in words, or the error of what does not work. Nothing is stored.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict

import torch

from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.data.prompts import load_prompt
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders import reference_response
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.models.compute.device import dtype_name
from rlvr_cli.models.identity import model_path
from rlvr_cli.models.load import load_policy, use_few_threads
from rlvr_cli.models.policy import Policy
from rlvr_cli.models.tokens.tokenization import collate, pad_id_of, tokenize_prompt_and_output
from rlvr_cli.samplers.open import EngineSettings, engine_kind
from rlvr_cli.samplers.parallel.process import SamplingProcess
from rlvr_cli.samplers.weight_check import PROBE_BOUND
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.updates.scores import compute_log_probs
from rlvr_cli.training.updates.update import train_update
from rlvr_cli.types import Completion, Request, Sampler, SamplingParams

GRADER = "r1_zero"
QUESTIONS = "arithmetic:8"
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, min_tokens=0, stop=())
UTILIZATION = 0.2  # of its device, that vLLM takes for the tiny model
LEARNING_RATE = 1e-3


def _questions() -> tuple[list[str], list[str]]:
    """Return prompts, and the responses that would be right."""
    template, examples = load_prompt(GRADER), load_dataset(QUESTIONS, purpose="train").examples
    right = [reference_response(GRADER, e.ground_truth) or "" for e in examples]
    return [template.fill(e.question) for e in examples], right


def _updated_policy(device: str) -> tuple[Policy, dict[str, float]]:
    """Return the built-in model after one update on right responses, and the metrics of the update."""
    policy = load_policy(model_path(""), device=device)
    use_few_threads(policy)
    batch = tokenize_prompt_and_output(*_questions(), policy.tokenizer)
    optimizer = make_optimizer(policy, learning_rate=LEARNING_RATE)
    metrics = train_update(policy, optimizer, batch, learning_rate=LEARNING_RATE, micro_batch_size=4)
    return policy, metrics


def precision(device: str, *, dtype: str) -> str:
    """Load weights in this precision. Returns that in which they compute, and the attention implementation."""
    policy = load_policy(model_path(""), dtype=dtype, device=device)
    return f"computes in {dtype_name(policy.compute_dtype)}, attention {policy.attention}"


def update(device: str) -> str:
    """Do one update. Raises RlvrError if its loss or gradient is not finite."""
    _, metrics = _updated_policy(device)
    loss, norm = metrics["loss/objective"], metrics["optimizer/grad_norm"]
    if metrics["update/skipped"]:
        raise RlvrError(
            f"The update was skipped: its loss is {loss:.4g} and its gradient norm {norm:.4g}.",
            "The model is sound: look at the driver, the PyTorch build and the device itself.",
        )
    return f"loss {loss:.4g}, gradient norm {norm:.4g}, {metrics['update/tokens']:.0f} tokens in {metrics['update/seconds']:.2g} s"


class EngineTrial:
    """An engine with its own copy of the built-in model, and a trainer on a device. Call `open` first, and `close` in the end.

    An engine that cannot share the trainer's model, such as vLLM, runs in a process of its own: if it crashes, it does so alone.

    Args:
        device: of the trainer and of the engine.
        cuda_graphs: see `EngineSettings`.
    """

    def __init__(self, engine: str, device: str, *, cuda_graphs: bool = True) -> None:
        self._engine, self._device = engine, device
        self._settings = EngineSettings(
            "", device=device, cuda_graphs=cuda_graphs, gpu_memory_utilization=UTILIZATION, max_model_len=1024
        )
        self._sampler: Sampler | None = None

    def open(self) -> str:
        """Start the engine."""
        kind = engine_kind(self._engine)
        if kind.share is not None:
            self._sampler = kind.open(self._settings)
        else:
            settings = asdict(self._settings) | {"param_dtype": "float32", "compute_dtype": "auto"}
            self._sampler = SamplingProcess(self._engine, settings)
        return " ".join(self._sampler.notes) or "started"

    def sample(self) -> str:
        """Sample greedily, and compare the log-probabilities with the trainer's."""
        return self._sampled(load_policy(model_path(""), device=self._device))

    def load_weights(self) -> str:
        """Load the weights of an updated policy, which the engine verifies, and sample from them."""
        assert self._sampler is not None
        policy, _ = _updated_policy(self._device)
        started = time.perf_counter()
        self._sampler.load_weights(policy, 1)
        return f"verified in {time.perf_counter() - started:.2g} s; {self._sampled(policy)}"

    def close(self) -> None:
        """End the engine, if it was opened."""
        if self._sampler is not None:
            self._sampler.close()

    def _sampled(self, policy: Policy) -> str:
        assert self._sampler is not None
        requests = [Request(prompt, (0,)) for prompt in _questions()[0]]
        list(self._sampler.sample(requests, GREEDY))  # the first time, kernels are loaded
        started = time.perf_counter()
        answers = list(self._sampler.sample(requests, GREEDY))
        seconds = time.perf_counter() - started
        tokens = sum(c.num_tokens for c in answers)
        gap = mean_gap(policy, answers)
        precision = dtype_name(policy.compute_dtype)
        if not gap <= PROBE_BOUND[precision]:  # NaN fails too
            raise RlvrError(
                f"The engine's log-probabilities differ from the trainer's by {gap:.2g} nats on average, and the bound for "
                f"{precision} is {PROBE_BOUND[precision]:g}.",
                "Engine and trainer do not compute the same model here: look at the versions and the device.",
            )
        return f"{tokens} tokens, {tokens / seconds:,.0f} a second; {gap:.1g} nats from the trainer in {precision}"


def mean_gap(policy: Policy, completions: Sequence[Completion]) -> float:
    """Return the mean |trainer - sampler| of the log-probabilities of sampled tokens, in nats."""
    batch = collate(
        [c.prompt_ids for c in completions], [c.token_ids for c in completions], pad_id=pad_id_of(policy.tokenizer)
    )
    scored = compute_log_probs(policy, batch, micro_batch_size=len(completions))[batch["response_mask"]]
    return float((scored - torch.tensor([x for c in completions for x in c.logprobs])).abs().mean())


def grading() -> str:
    """Grade right and empty responses in a process. Raises RlvrError if a verdict is wrong."""
    truths = [e.ground_truth for e in load_dataset(QUESTIONS, purpose="train").examples]
    right = [(reference_response(GRADER, truth) or "", truth) for truth in truths]
    with GraderPool(GRADER, workers=1, timeout=60) as pool:
        grades = pool.grade(right + [("", truth) for truth in truths])
    expected = [1.0] * len(truths) + [0.0] * len(truths)
    wrong = [g for g, reward in zip(grades, expected, strict=True) if g.reward != reward]
    if wrong:
        raise RlvrError(
            f"{len(wrong)} of {len(grades)} verdicts are wrong ({wrong[0].error or 'another reward'}).",
            "The graders import sympy and math-verify: look at these.",
        )
    return f"{len(grades)} responses"
