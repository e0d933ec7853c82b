"""The data types shared by all rooms: frozen dataclasses and the sampler protocols; standard library only.

Data flows Example -> Request -> Completion -> Grade -> Rollout. The fields of `Rollout`, `Segment`, `Regrade` and `Metric` define
the columns of the Parquet files: name, order, type, and nullable where a field may be None. `runs.storage.schemas` derives the
schemas from them.

To add a column, append a field with the schema version that introduces it and a default, the value that older files
read as:

    value: Annotated[Float32 | None, Since(SCHEMA_VERSION)] = None
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    from concurrent.futures import Future  # it takes as long to import as all else here

SCHEMA_VERSION = 9  # of run.json, the manifest and the Parquet files; a change that adds columns raises it


@dataclass(frozen=True, slots=True)
class Since:
    """The schema version that introduced a column. In files of an older version it reads as the field's default."""

    version: int


# Columns stored with fewer bits than Python's types: the widths that the engines compute with.
Int32 = Annotated[int, "int32"]
Float32 = Annotated[float, "float32"]
TokenIds = tuple[Int32, ...]
LogProbs = tuple[Float32, ...]  # nats


class Turn(NamedTuple):
    """Who wrote which tokens of a response: `response_ids[start:end]`."""

    role: str  # "policy", "environment" or the name of a tool
    start: Int32
    end: Int32


class Candidate(NamedTuple):
    """What `rlvr discover` knows of a response besides its reward: the program in it, where it came from, and what it did."""

    number: int  # of the attempt: from 0, in the order of rounds and their slots; a round is a step, a slot a sample
    parents: tuple[int, ...]  # the attempts that the prompt shows; the program to start from is none of them
    island: int
    proposer: str  # the engine, or "mutate" or "replay"
    program: str | None  # None: there is no code in the response
    program_sha256: str | None
    num_points: int | None  # None: the verifier does not count, or there was nothing to count
    points_sha256: str | None  # of what the program gave, the file points/SHA256.json; None: no reward
    error: str | None  # what the next prompt says of it
    same_as: int | None  # an earlier attempt with this program: its verdict was taken, nothing was run
    status: str | None  # how the program ended; None: nothing was run
    seconds: float | None  # that the program took
    layers: tuple[str, ...]  # of the sandbox, that were active


class Episode(NamedTuple):
    """What a row knows of an episode: a response in which an environment answers the policy, turn after turn."""

    num_turns: Int32  # of the policy
    num_policy_tokens: Int32  # tokens of the response that the policy sampled
    ended_by: str  # "policy", "environment", "turns" (--max-turns), "length" or "error" (of the environment)
    tool_calls: Int32
    tool_errors: Int32  # calls that failed, and were answered so
    forged: Int32  # answers of the environment that the policy wrote itself
    environment_seconds: float  # that the environment took to answer
    turn_rewards: tuple[Float32 | None, ...] | None  # of each turn of the policy; None: the environment gives none
    # The last turn of the policy, which the grader reads: these characters of `response`.
    graded_from: Int32
    graded_to: Int32


class Measured(NamedTuple):
    """What an environment measured of an episode, besides its reward."""

    name: str
    value: float


class TurnFacts(NamedTuple):
    """What a row knows of the turns of an episode, besides who wrote which tokens."""

    ends: tuple[Int32, ...]  # where each turn ends in `response`, in characters
    failed: tuple[Int32, ...]  # turns of the policy, from 0, whose call failed
    forged: tuple[Int32, ...]  # turns of the policy in which it wrote an answer of the environment itself


class Judgement(NamedTuple):
    """What a judge said of a response: another model, behind an endpoint (`judges`)."""

    reply: str  # all that it said
    score: str | None  # as its last line has it; None: there is no score of the rubric's scale
    model: str  # as the endpoint names it
    asked_sha256: str  # of all that determines the reply: the text it was asked, the model, and how it was sampled
    prompt_tokens: Int32
    reply_tokens: Int32
    cached: bool  # the same was asked before: nothing was paid


class Conversation(NamedTuple):
    """A trace of a chat model, of which the assistant's turns are trained on; it ends with one."""

    messages: tuple[dict[str, Any], ...]  # as chat templates read them
    tools: (
        tuple[dict[str, Any], ...] | None
    )  # JSON schemas of the tools that it was told of; None: those of the options

    @property
    def question(self) -> str:
        """What the user says first."""
        return next(message["content"] for message in self.messages if message["role"] == "user")

    @property
    def text(self) -> str:
        """What is said from the first answer on; it tells traces apart."""
        start = next(i for i, message in enumerate(self.messages) if message["role"] == "assistant")
        return "\n".join(str(m.get("tool_calls", "")) + m["content"] for m in self.messages[start:])


FinishReason = Literal["stop", "length"]
Phase = Literal["train", "eval"]
ChatThinking = Literal["auto", "on", "off"]  # auto: as the chat template has it
GraderName = Literal[  # modules of graders/
    "r1_zero", "question_only", "math_verify", "gsm8k", "countdown", "python", "reasoning_gym", "multiple_choice"
]  # fmt: skip
FormatRule = Literal["literal", "lenient"]  # exactly one space between </think> and <answer>, or any white space
WITH_FORMAT_RULE = ("r1_zero", "countdown", "reasoning_gym")  # the graders that have one
ENVIRONMENT = "environment"  # the role of what it says, and the grader of a row whose reward it gave
ORDERS = 2  # in which a judge sees two responses: in 0 that of A is first, in 1 that of B
PROGRAM_SECONDS = 5.0  # that a program of the environment python may take
KEPT_CHARACTERS = 1_000  # of an extracted answer, of the text of an error


@dataclass(frozen=True, slots=True)
class Example:
    """One question of a dataset, with its ground truth."""

    id: str  # unique in its dataset
    question: str  # empty: unknown, as in the rollouts of a run, which keep only the prompt
    ground_truth: str
    # Already formatted, as in the handout's sft.jsonl; None: fill the template with `question`.
    prompt: str | None = None
    response: str | None = None  # a trace to train on (SFT)
    # A worked solution without the format of a prompt; SFT turns it into a trace when `response` is None.
    solution: str | None = None
    # Who wrote what in `response`, as (role, text): only what the role "policy" wrote is trained on; None: all of it.
    turns: tuple[tuple[str, str], ...] | None = None
    conversation: Conversation | None = None  # in place of prompt and response: a trace of a chat model


class SampledIds(NamedTuple):
    """The token ids of a trace, as they were sampled."""

    prompt: list[int]
    response: list[int]
    mask: list[bool] | None  # of the response's ids, as in `Rollout`
    ends: Sequence[tuple[int, int]] = ()  # of each turn of an episode, among the response's ids and in its text


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled. Training and evaluation each have their own parameters."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    max_tokens: int = 1024  # per response
    min_tokens: int = 4  # neither EOS nor a stop string ends a response before this many tokens
    stop: tuple[str, ...] = ("</answer>",)  # ends the response and is kept in its text


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, to be answered once per seed."""

    prompt: str
    seeds: tuple[int, ...]  # each in [0, 2**63); weights, prompt and seed determine the tokens of a sample
    name: str = ""  # how error messages refer to it; empty: by its index
    prompt_ids: tuple[int, ...] | None = None  # sampled from as given; None: tokenize `prompt`
    # So many of the last `prompt_ids` are the beginning of the response, which is to be continued: `min_tokens` and stop strings
    # are of the whole response, `max_tokens` of what is added.
    begun: int = 0
    max_tokens: int | None = None  # fewer than those of the `SamplingParams`; None: as many
    # The completion of this call, as (request_index, sample_index), whose prompt and tokens `prompt_ids` begin with: what an engine
    # has computed for it need not be computed again.
    after: tuple[int, int] | None = None
    common_prefix: str = ""  # what the prompt begins with, as others of its data do: an engine may compute it once
    example: Example | None = None  # for the environment of an episode; an engine passes over it


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response: the policy's answer to one request with one seed."""

    request_index: int  # into the requests given to `sample`
    sample_index: int  # into that request's seeds
    text: str  # of the response, with what it began with (`Request.begun`) and the stop string
    prompt_ids: tuple[int, ...]  # empty when the engine does not report them (an endpoint)
    token_ids: tuple[int, ...]  # as sampled, including a sampled EOS; empty when the engine does not report them
    # One per token, nats, under the distribution sampled from; 0 where `response_mask` is False.
    logprobs: tuple[float, ...]
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: FinishReason
    stop_reason: str | None  # the stop string, "eos" or an endpoint's own reason; None when it hit the length limit
    # Mean exact entropy over the sampled tokens (nats); None when the engine does not report it.
    mean_entropy: float | None
    response_mask: tuple[bool, ...] | None = None  # as in `Rollout`
    turns: tuple[Turn, ...] | None = None  # as in `Rollout`
    prompt: str | None = None  # of an episode: the request's, or what its environment gave in place of it
    episode: Episode | None = None
    turn_facts: TurnFacts | None = None
    measured: tuple[Measured, ...] | None = None  # as in `Rollout`
    grade: "Grade | None" = None  # of the environment; None: the grader judges

    @property
    def graded_text(self) -> str:
        """What the grader reads: the response, of an episode the last turn of the policy."""
        return self.text if self.episode is None else self.text[self.episode.graded_from : self.episode.graded_to]


@dataclass(frozen=True, slots=True)
class Grade:
    """A grader's verdict. When grading failed, `error` is set and the rewards are None, never a silent 0.

    Of a longer `extracted_answer` or `error_detail` only the first 1,000 characters are kept.
    """

    format_reward: float | None  # None with a reward: the grader gave nothing but the reward
    answer_reward: float | None
    reward: float | None
    extracted_answer: str | None = None
    failure_kind: str | None = None  # why there was no reward; None for a rewarded response
    error: str | None = None  # "timeout", "crash" or the exception's name; of a judge one of `judges.pool.FAILURES`
    error_detail: str | None = None  # FILE:LINE of a user's function, and the exception's text
    judgement: Judgement | None = None  # of a judge that replied

    def __post_init__(self) -> None:
        for name in ("extracted_answer", "error_detail"):
            text = getattr(self, name)
            if text is not None and len(text) > KEPT_CHARACTERS:
                object.__setattr__(self, name, text[:KEPT_CHARACTERS])  # frozen

    @property
    def category(self) -> str:
        """The handout's three categories, `format_1_answer_1` and so on; `reward_only`, or `grade_error`."""
        if self.reward is None:
            return "grade_error"
        if self.format_reward is None or self.answer_reward is None:
            return "reward_only"
        return f"format_{int(self.format_reward > 0.5)}_answer_{int(self.answer_reward > 0.5)}"


class Graders(Protocol):
    """What grades responses in the background: processes (`graders.pool`), or a judge (`judges.pool`)."""

    spec: str  # the name of the grader
    batch_size: int  # stored responses that are graded at a time; a stop gives up the batches under way
    failed: int  # grades that failed so far

    @property
    def facts(self) -> dict[str, Any]:
        """What identifies the grader, for run.json."""
        ...

    @property
    def sha256(self) -> str | None:
        """Of what the name alone does not say: a file. None for a grader of the package."""
        ...

    @property
    def price(self) -> str:
        """What grading has cost so far, in words; empty: nothing that is paid for."""
        ...

    def grade(
        self, pairs: Sequence[tuple[str, str]], *, example_of: Callable[[int], Mapping[str, Any]] | None = None
    ) -> list[Grade]:
        """The verdicts on (response, ground truth) pairs, in order."""
        ...

    def submit(
        self, pairs: Sequence[tuple[str, str]], *, example_of: Callable[[int], Mapping[str, Any]] | None = None
    ) -> "Future[list[Grade]]":
        """Run `grade` in the background. The future holds its grades or its exception."""
        ...

    def recall(self, run: Path) -> None:
        """Take what a run has stored for known, where that saves grading anew."""
        ...

    def close(self) -> None:
        """End what grades; pending calls raise `CancelledError`. May be called twice."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Rollout:
    """One row: a prompt, the policy's response and its grade.

    (run_id, phase, step, example_id, sample_index) is unique in a run.
    """

    run_id: str
    phase: Phase
    step: int  # optimizer updates completed when it was sampled
    policy_version: int
    example_id: str
    sample_index: int
    prompt: str
    response: str
    ground_truth: str
    prompt_ids: TokenIds
    response_ids: TokenIds
    sampled_logprobs: LogProbs  # one per response token; 0 for tokens that the policy did not sample
    finish_reason: FinishReason
    stop_reason: str | None
    num_prompt_tokens: Int32
    num_response_tokens: Int32  # including tokens that the policy did not sample
    grader: str
    format_reward: float | None
    answer_reward: float | None
    reward: float | None  # None: grading failed, see grade_error
    grade_error: str | None
    extracted_answer: str | None
    category: str
    failure_kind: str | None
    advantage: float | None  # None outside training
    mean_logprob: float | None  # over the tokens that the policy sampled
    mean_entropy: float | None
    seed: int
    sampled_at: datetime  # UTC, naive
    # One per response token: True where the policy sampled the token and so trains on it; None: it sampled all of them.
    response_mask: Annotated[tuple[bool, ...] | None, Since(2)] = None
    # In order and non-overlapping; None: the response is a single turn of the policy.
    turns: Annotated[tuple[Turn, ...] | None, Since(2)] = None
    # What advantages are made of: the reward (0 where grading failed) plus the terms, each already weighted; a term is None where it
    # is not asked for, and all are None outside of GRPO's training phase.
    shaped_reward: Annotated[float | None, Since(2)] = None
    format_term: Annotated[float | None, Since(2)] = None
    length_term: Annotated[float | None, Since(2)] = None
    language_term: Annotated[float | None, Since(2)] = None
    overlong_term: Annotated[float | None, Since(2)] = None
    # One per response token: the version of the policy that sampled it; None: `policy_version` sampled all of them.
    token_versions: Annotated[tuple[Int32, ...] | None, Since(3)] = None
    grade_error_detail: Annotated[str | None, Since(3)] = None
    candidate: Annotated[Candidate | None, Since(4)] = None  # of `rlvr discover`
    episode: Annotated[Episode | None, Since(5)] = None  # of --environment
    # One per turn of the policy (--credit turn): the advantage of its tokens; `advantage` is then their mean over the policy's tokens.
    # None: all of the policy's tokens have `advantage`.
    turn_advantages: Annotated[tuple[float, ...] | None, Since(6)] = None
    turn_facts: Annotated[TurnFacts | None, Since(6)] = None  # of an episode
    judgement: Annotated[Judgement | None, Since(7)] = None  # of --grader judge:RUBRIC.md
    # Each name once; None: no episode, one that was not judged, or an environment that measures nothing.
    measured: Annotated[tuple[Measured, ...] | None, Since(8)] = None
    # Whether the environment gave the prompt, and the dataset's question is not in it; None: no episode.
    own_prompt: Annotated[bool | None, Since(9)] = None

    @property
    def num_policy_tokens(self) -> int:
        """Tokens of the response that the policy sampled."""
        if self.response_mask is None:
            return self.num_response_tokens
        return sum(self.response_mask)

    @property
    def policy_turns(self) -> list[Turn]:
        """The turns of the policy, in order."""
        turns = self.turns or (Turn("policy", 0, len(self.response_ids)),)
        return [turn for turn in turns if turn.role == "policy"]


@dataclass(frozen=True, slots=True)
class Segment:
    """One row: the tokens that a training response got in one step of --partial-rollout-tokens, or a whole response of
    `rlvr discover` as it arrived, before its program ran.

    (run_id, phase, step, example_id, sample_index) is unique in a run. The segments of a response, in the order of their steps, are
    the response.
    """

    run_id: str
    phase: Phase
    step: int  # optimizer updates completed when it was sampled
    policy_version: int
    example_id: str
    sample_index: int
    start: Int32  # tokens of the response before these
    response: str  # the text up to the last of these tokens
    prompt_ids: TokenIds
    response_ids: TokenIds  # these tokens
    sampled_logprobs: LogProbs
    finish_reason: FinishReason | None  # of the response; None: it goes on in the next step
    stop_reason: str | None
    mean_entropy: float | None  # over these tokens
    seed: int
    sampled_at: datetime  # UTC, naive
    # As the engine counts them; None: `prompt_ids` and `response_ids` are all.
    num_prompt_tokens: Annotated[Int32 | None, Since(4)] = None
    num_response_tokens: Annotated[Int32 | None, Since(4)] = None


class Sampler(Protocol):
    """The interface between the algorithms and an inference engine."""

    @property
    def engine(self) -> str:
        """The engine's name: transformers, vllm or openai."""
        ...

    @property
    def policy_version(self) -> int:
        """The version of the weights that are sampled from."""
        ...

    @property
    def seeding(self) -> str:
        """How samples are seeded: "per-request", "endpoint" (which may ignore the seeds sent to it) or "none"."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Messages for the user about the engine, one sentence each."""
        ...

    @property
    def worked_seconds(self) -> float | None:
        """Seconds of work behind the last `sample` call; None: the same as the time that the caller waited."""
        ...

    @property
    def arrived(self) -> Sequence[Completion]:
        """What had arrived and was not yielded when the last `sample` was closed, if it costs more than time to repeat."""
        ...

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Generator[Completion]:
        """Yield a completion per seed of every request, as they finish; closing the generator cancels the rest."""
        ...

    def load_weights(self, policy: Any, policy_version: int) -> None:
        """Load the weights of a `models.policy.Policy` and verify that the engine samples from them."""
        ...

    def sleep(self) -> None:
        """Release the device memory until the next `sample` or `load_weights`."""
        ...

    def close(self) -> None:
        """Release the engine's memory and end its processes."""
        ...


class PrefetchingSampler(Sampler, Protocol):
    """A sampler that can work in the background."""

    def prefetch(self, requests: Sequence[Request], params: SamplingParams) -> None:
        """Start sampling in the background; the next `sample` call, with the same requests, returns the results."""
        ...


class MoreRequests(Protocol):
    """Requests that come while others are sampled, as token ids."""

    def take(self, *, wait: bool) -> Sequence[Request]:
        """Return those that have come since the last call. None when it had to wait: no more will come."""
        ...

    def notify(self, call: Callable[[], None]) -> None:
        """Call this, in any thread, whenever `take` may return something, for who waits for something else too."""
        ...


class MoreTurns(MoreRequests, Protocol):
    """Those of episodes: each follows a completion."""

    @property
    def most_tokens(self) -> int:
        """A prompt and what is sampled for it have at most so many tokens together."""
        ...

    def awaits(self, key: tuple[int, int]) -> bool:
        """Return whether a request may come after the completion with this (request index, sample index)."""
        ...


class JoinableSampler(Sampler, Protocol):
    """A sampler whose running call takes further requests."""

    @property
    def context_length(self) -> int | None:
        """The most tokens of a prompt and its response; None: it is not known."""
        ...

    def sample(
        self, requests: Sequence[Request], params: SamplingParams, *, more: MoreTurns | None = None
    ) -> Generator[Completion]:
        """As `Sampler.sample`; the requests of `more` have the indices after those of `requests`."""
        ...


@dataclass(frozen=True, slots=True)
class Regrade:
    """Another grader's verdict on the rollout with the key (phase, step, example_id, sample_index).

    If one grader made several attempts on a rollout, the last one counts.
    """

    run_id: str
    phase: Phase
    step: int
    example_id: str
    sample_index: int
    grader: str
    attempt: int  # 0 at first; increases by one each time everything is regraded, or what failed
    # Of the file, for FILE.py:FUNCTION; of rubric, model and how it is sampled, for a judge; None for a built-in grader.
    grader_sha256: str | None
    format_reward: float | None
    answer_reward: float | None
    reward: float | None  # None: grading failed, see grade_error
    grade_error: str | None
    extracted_answer: str | None
    category: str
    failure_kind: str | None
    grade_error_detail: Annotated[str | None, Since(3)] = None
    judgement: Annotated[Judgement | None, Since(7)] = None  # of --grader judge:RUBRIC.md


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of metrics.parquet; (step, phase, name) is unique in it."""

    step: int
    phase: Phase
    name: str
    value: float
    wall_seconds: float  # of work since the run started, excluding pauses
    gpu_seconds: float | None  # not measured: always NULL; wall_seconds times the GPUs of run.json is what a run held


class PValue(float):
    """A p-value in a table: JSON and CSV have the number, people read `text`."""

    @property
    def text(self) -> str:
        """With two digits; one that is tiny, or 0 since it is too small for a float, is only said to be small."""
        return "< 0.0001" if self < 1e-4 else f"{self:.2g}"


@dataclass(frozen=True, slots=True)
class Table:
    """A table to print: rows with named columns; a missing value is None."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    title: str = ""
    more: bool = False  # a limit cut rows off

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield each row as a dict by column name."""
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)
