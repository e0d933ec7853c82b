"""The nouns that every room speaks in: frozen dataclasses and one protocol, standard library only.

Data flows Example -> Request -> Completion -> Grade -> Rollout. The fields of `Rollout`, `Regrade` and `Metric` are the columns
of the Parquet files: name, order, type, and NULL where a field may be None. `runs.schemas` reads them off here.

To add a column, put a field last, say since when it is there, and give it a default: what a file without it reads as ::

    SCHEMA_VERSION = 3
    value: Annotated[Float32 | None, Since(3)] = None
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, NamedTuple, Protocol

SCHEMA_VERSION = 2  # of run.json, the manifest and the Parquet files together; a newer column raises it


@dataclass(frozen=True, slots=True)
class Since:
    """The schema version in which a column came. A file of an older version reads as if it held the field's default."""

    version: int


# Where a column is stored narrower than Python's type: these as the engines compute them.
Int32 = Annotated[int, "int32"]
Float32 = Annotated[float, "float32"]
TokenIds = tuple[Int32, ...]
LogProbs = tuple[Float32, ...]  # nats


class Turn(NamedTuple):
    """Who wrote which tokens of a response: `response_ids[start:end]`."""

    role: str  # "policy", or whoever answers it: "environment", the name of a tool
    start: Int32
    end: Int32


FinishReason = Literal["stop", "length"]
Phase = Literal["train", "eval"]
FormatRule = Literal["literal", "lenient"]  # of r1_zero and countdown: one space between the tags, or any white space


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its answer, as a dataset holds it."""

    id: str  # unique in its dataset
    question: str
    ground_truth: str
    prompt: str | None = (
        None  # already formatted, as in the handout's sft.jsonl; else the template is filled with `question`
    )
    response: str | None = None  # a trace to train on (SFT)
    solution: str | None = None  # instead of one: how the answer is worked out, in no prompt's format


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Train and eval each have their own."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    max_tokens: int = 1024  # per response
    min_tokens: int = 4  # neither EOS nor a stop string ends a response before this many tokens
    stop: tuple[str, ...] = ("</answer>",)  # ends the response and is kept in its text


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, to be answered once per seed."""

    prompt: str
    seeds: tuple[
        int, ...
    ]  # each in [0, 2**63); the tokens of a sample are a function of the weights, the prompt and its seed
    name: str = ""  # what errors call it; empty: its index
    prompt_ids: tuple[int, ...] | None = None  # what is sampled from, as it is; None: the tokens of `prompt`


@dataclass(frozen=True, slots=True)
class Completion:
    """What the policy answered to one seed of one request."""

    request_index: int  # into the requests given to `sample`
    sample_index: int  # into that request's seeds
    text: str  # the stop string is kept
    prompt_ids: tuple[int, ...]  # empty when the engine does not tell (an endpoint)
    token_ids: tuple[int, ...]  # as sampled, EOS included when it was sampled; empty when the engine does not tell
    logprobs: tuple[
        float, ...
    ]  # one per token, of the distribution that was sampled from (nats); 0 where `response_mask` is False
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: FinishReason
    stop_reason: str | None  # the stop string, "eos", an endpoint's own word, or None when the length limit ended it
    mean_entropy: (
        float | None
    )  # mean over the sampled tokens of the exact entropy (nats); None when the engine does not tell
    response_mask: tuple[bool, ...] | None = None  # as in `Rollout`
    turns: tuple[Turn, ...] | None = None  # as in `Rollout`


@dataclass(frozen=True, slots=True)
class Grade:
    """A grader's verdict. A grade that failed has `error` and no rewards: it is never a silent 0."""

    format_reward: float | None
    answer_reward: float | None
    reward: float | None
    extracted_answer: str | None = None
    failure_kind: str | None = None  # why there was no reward; None for a rewarded response
    error: str | None = None  # "timeout", "crash" or the exception's name

    @property
    def category(self) -> str:
        """The handout's three categories, `format_1_answer_1` and so on, or `grade_error`."""
        if self.format_reward is None or self.answer_reward is None:
            return "grade_error"
        return f"format_{int(self.format_reward > 0.5)}_answer_{int(self.answer_reward > 0.5)}"


@dataclass(frozen=True, slots=True)
class Rollout:
    """One row: a prompt, what the policy answered, and what the grader said of it.

    (run_id, phase, step, example_id, sample_index) is unique in a run.
    """

    run_id: str
    phase: Phase
    step: int  # optimizer updates done when it was sampled
    policy_version: int
    example_id: str
    sample_index: int
    prompt: str
    response: str
    ground_truth: str
    prompt_ids: TokenIds
    response_ids: TokenIds
    sampled_logprobs: LogProbs  # one per response token; 0 for those that the policy did not sample
    finish_reason: FinishReason
    stop_reason: str | None
    num_prompt_tokens: Int32
    num_response_tokens: Int32  # all of them, whoever wrote them
    grader: str
    format_reward: float | None
    answer_reward: float | None
    reward: float | None  # None: the grade failed, see grade_error
    grade_error: str | None
    extracted_answer: str | None
    category: str
    failure_kind: str | None
    advantage: float | None  # None outside training
    mean_logprob: float | None  # over the tokens that the policy sampled
    mean_entropy: float | None
    seed: int
    sampled_at: datetime  # UTC, naive
    # One per response token: whether the policy sampled it, and so trains on it; None: it sampled all of them.
    response_mask: Annotated[tuple[bool, ...] | None, Since(2)] = None
    # In their order, without overlap; None: the response is one turn of the policy.
    turns: Annotated[tuple[Turn, ...] | None, Since(2)] = None


class Sampler(Protocol):
    """The seam between the algorithms and an inference engine."""

    @property
    def engine(self) -> str:
        """Its name: transformers, vllm or openai."""
        ...

    @property
    def policy_version(self) -> int:
        """The version of the weights that it samples from."""
        ...

    @property
    def seeding(self) -> str:
        """Whose seeds its draws come from: "per-request", "endpoint" or "none"."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What it has to say of itself, one sentence each."""
        ...

    @property
    def worked_seconds(self) -> float | None:
        """How long it worked on what `sample` answered last; None: as long as that was waited for."""
        ...

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Generator[Completion]:
        """Answer every seed of every request, in the order in which they finish; closing it gives up what is not done."""
        ...

    def load_weights(self, policy: Any, policy_version: int) -> None:
        """Sample from the weights of a `models.policy.Policy` from now on, and prove it."""
        ...

    def sleep(self) -> None:
        """Give the device's memory back until it samples or is given weights again."""
        ...

    def close(self) -> None:
        """Give the engine's memory and processes back."""
        ...


class PrefetchingSampler(Sampler, Protocol):
    """A sampler that works while nobody waits for it."""

    def prefetch(self, requests: Sequence[Request], params: SamplingParams) -> None:
        """Begin to answer: the next `sample` of just these requests finds what is done by then."""
        ...


@dataclass(frozen=True, slots=True)
class Regrade:
    """What another grader says of a rollout, which has the key (phase, step, example_id, sample_index).

    Of several attempts of one grader on a rollout the last counts.
    """

    run_id: str
    phase: Phase
    step: int
    example_id: str
    sample_index: int
    grader: str
    attempt: int  # 0; one more each time that everything is graded again
    grader_sha256: str | None  # of the file of FILE.py:FUNCTION; None for a grader of ours
    format_reward: float | None
    answer_reward: float | None
    reward: float | None  # None: the grade failed, see grade_error
    grade_error: str | None
    extracted_answer: str | None
    category: str
    failure_kind: str | None


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of metrics.parquet; (step, phase, name) is unique in it."""

    step: int
    phase: Phase
    name: str
    value: float
    wall_seconds: float  # of work since the run started, pauses left out
    gpu_seconds: float | None  # none is measured: NULL


@dataclass(frozen=True, slots=True)
class Table:
    """What is printed: rows with named columns; a missing value is None."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    title: str = ""
    more: bool = False  # rows were left out because of a limit

    def records(self) -> Iterator[dict[str, Any]]:
        """The rows by column."""
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)
