"""One attempt: the program in a response is run in the sandbox, and what it gives is verified.

Enters: a response, and the attempts before it. Leaves: a `Trial`, and the row that it becomes. Programs may run in any thread; a verifier
is the user's own code, and is called in the main thread: `signal.alarm` works nowhere else.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlvr_cli.discovery.tasks import Judgment, Task
from rlvr_cli.discovery.verify_program import points_of, run_candidate
from rlvr_cli.graders.answers.extraction import last_code_block
from rlvr_cli.rollouts.grading import grade_fields
from rlvr_cli.rollouts.metrics import mean_or_none
from rlvr_cli.sandbox.run import Execution, Limits
from rlvr_cli.text import storable
from rlvr_cli.types import Candidate, Grade, Rollout, Segment

NO_CODE = "There is no Python program in the answer: write one complete program in a ```python block."
CHANGING = {"timeout", "cpu", "memory"}  # failures that another run of the same program may not have
STARTING = "the program to start from"
START = -1  # number of the program to start from, where it stands among attempts
COLUMNS = (
    "step",
    "sample_index",
    "reward",
    "failure_kind",
    "num_prompt_tokens",
    "num_response_tokens",
    "candidate",
)  # of `Known`


@dataclass(frozen=True, slots=True)
class Known:
    """What later rounds know of a committed attempt, or of the program to start from, if that is valid."""

    number: int
    round: int
    slot: int
    island: int
    parents: tuple[int, ...]
    program: str | None
    sha256: str | None
    reward: float | None  # None: the verifier failed
    failure_kind: str | None
    error: str | None
    num_points: int | None
    points_sha256: str | None
    tokens: int  # of prompt and response
    judged: bool = False  # whether the verifier was asked
    counted: bool = True  # whether `tokens` are all; some endpoints count none

    @property
    def is_valid(self) -> bool:
        return self.points_sha256 is not None

    @property
    def is_start(self) -> bool:
        return self.number == START

    @property
    def score(self) -> float:
        return self.reward or 0.0


class Ran(NamedTuple):
    """A response whose program has run."""

    program: str | None
    execution: Execution | None = None  # None: nothing was run
    same_as: Known | None = None


class Trial(NamedTuple):
    """What came of a response."""

    program: str | None
    judgment: Judgment
    points: str | None  # JSON; None: no reward
    execution: Execution | None  # None: nothing was run
    same_as: Known | None


def known_of(rows: Iterable[Mapping[str, Any]]) -> list[Known]:
    """Read committed rows, of the columns `COLUMNS`, in the order of their numbers."""
    known = [
        Known(
            number=row["candidate"]["number"],
            round=row["step"],
            slot=row["sample_index"],
            island=row["candidate"]["island"],
            parents=tuple(row["candidate"]["parents"]),
            program=row["candidate"]["program"],
            sha256=row["candidate"]["program_sha256"],
            reward=row["reward"],
            failure_kind=row["failure_kind"],
            error=row["candidate"]["error"],
            num_points=row["candidate"]["num_points"],
            points_sha256=row["candidate"]["points_sha256"],
            tokens=row["num_prompt_tokens"] + row["num_response_tokens"],
            judged=row["candidate"]["status"] == "ok",
            counted=row["num_prompt_tokens"] > 0
            and (row["num_response_tokens"] > 0 or row["candidate"]["program"] is None),
        )
        for row in rows
    ]
    return sorted(known, key=lambda attempt: attempt.number)


def known_start(program: str, *, score: float, num_points: int | None, points_sha256: str) -> Known:
    """The program to start from, which is valid, as what attempts compete with."""
    return Known(
        number=START,
        round=START,
        slot=START,
        island=START,
        parents=(),
        program=program,
        sha256=sha256_of(program),
        reward=score,
        failure_kind=None,
        error=None,
        num_points=num_points,
        points_sha256=points_sha256,
        tokens=0,
    )


def by_rank(known: Known) -> tuple[float, bool, int]:
    """A key that sorts the highest score first, of several the first attempt, and the program to start from after attempts as good."""
    return -known.score, known.is_start, known.number


def best_of(known: Iterable[Known]) -> Known | None:
    """What has the highest score, the first by `by_rank`; None if nothing is valid."""
    return min((k for k in known if k.is_valid), key=by_rank, default=None)


def name_of(known: Known) -> str:
    return STARTING if known.is_start else f"attempt {known.number}"


def sha256_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def run_response(response: str, *, limits: Limits, require_sandbox: bool, earlier: Mapping[str, Known]) -> Ran:
    """Run the program in a response, unless an attempt of an earlier round had the same.

    Args:
        earlier: by the sha256 of their program.
    """
    program = last_code_block(response)
    if program is None or not program.strip():
        return Ran(None)
    program = storable(program)
    same = earlier.get(sha256_of(program))
    if same is not None and same.reward is not None and same.failure_kind not in CHANGING:
        return Ran(program, same_as=same)
    return Ran(program, run_candidate(program, limits=limits, require_sandbox=require_sandbox))


def judged(ran: Ran, task: Task) -> Trial:
    """Judge what a program gave, in this process and thread."""
    program, execution, same = ran
    if same is not None:
        assert same.reward is not None, "a verdict"
        grade = Grade(None, None, same.reward, None, same.failure_kind)
        return Trial(program, Judgment(grade, same.error, same.num_points), None, None, same)
    if execution is None:
        return Trial(None, Judgment(Grade(None, None, 0.0, None, "no_code"), NO_CODE), None, None, None)
    points = json.dumps(points_of(execution), separators=(",", ":"))  # before a verifier may change them
    judgment = task.judge(execution)
    return Trial(program, judgment, points if judgment.error is None else None, execution, None)


def run_and_verify(program: str, task: Task, *, limits: Limits, require_sandbox: bool) -> Trial:
    """Run a program in the sandbox, and judge what it gives."""
    return judged(Ran(program, run_candidate(program, limits=limits, require_sandbox=require_sandbox)), task)


def row_of(
    segment: Segment, trial: Trial, *, number: int, parents: tuple[int, ...], island: int, prompt: str, proposer: str, grader: str
) -> Rollout:  # fmt: skip
    """The row of an attempt. `segment` is its response as it was stored."""
    execution, same, grade = trial.execution, trial.same_as, trial.judgment.grade
    assert segment.finish_reason is not None, "a response is a single segment"
    graded: dict[str, Any] = grade_fields(grade, finish_reason=segment.finish_reason)
    graded["failure_kind"] = grade.failure_kind  # as the next prompt has it, also of a response that was cut off
    return Rollout(
        run_id=segment.run_id,
        phase=segment.phase,
        step=segment.step,
        policy_version=segment.policy_version,
        example_id=segment.example_id,
        sample_index=segment.sample_index,
        prompt=prompt,
        response=segment.response,
        ground_truth="",
        prompt_ids=segment.prompt_ids,
        response_ids=segment.response_ids,
        sampled_logprobs=segment.sampled_logprobs,
        finish_reason=segment.finish_reason,
        stop_reason=segment.stop_reason,
        num_prompt_tokens=segment.num_prompt_tokens or 0,
        num_response_tokens=segment.num_response_tokens or 0,
        grader=grader,
        **graded,
        advantage=None,
        mean_logprob=mean_or_none(segment.sampled_logprobs),
        mean_entropy=segment.mean_entropy,
        seed=segment.seed,
        sampled_at=segment.sampled_at,
        candidate=Candidate(
            number=number,
            parents=parents,
            island=island,
            proposer=proposer,
            program=trial.program,
            program_sha256=None if trial.program is None else sha256_of(trial.program),
            num_points=trial.judgment.num_points,
            points_sha256=sha256_of(trial.points) if trial.points is not None else same and same.points_sha256,
            error=trial.judgment.error,
            same_as=None if same is None else same.number,
            status=None if execution is None else execution.status,
            seconds=None if execution is None else execution.seconds,
            layers=() if execution is None else execution.layers,
        ),
    )
