"""What is searched for: a prompt, a program to start from, and the verifier of what programs give.

Enters: `kissing` and its dimension, or a directory with prompt.md, program.py and verify.py. Leaves: a `Task`. The verifier is trusted: it
runs in this process, with the user's rights. Programs are not: see `rlvr_cli.sandbox`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rlvr_cli import user_code
from rlvr_cli.config.discover import KISSING
from rlvr_cli.discovery.verify_program import CATEGORIES, points_of, verify_execution
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.custom import error_detail, grade_of
from rlvr_cli.runs.storage.files import shown
from rlvr_cli.sandbox.run import Execution
from rlvr_cli.text import storable
from rlvr_cli.types import Grade

VERIFIER = user_code.Role("verifier", 1, "(points: object) -> float | dict")
_HERE = Path(__file__).parent


class Judgment(NamedTuple):
    """What comes of a program that was run."""

    grade: Grade  # its reward is the score, 0 if the points are not valid; None with an error: the verifier failed
    error: str | None  # for the next prompt; None: valid
    num_points: int | None = None
    said: Mapping[str, Any] = {}  # what `--verify` prints: all that the verifier returned, as JSON values


@dataclass(frozen=True)
class Task:
    name: str  # the rows' example_id
    prompt: str
    program: str
    grader: str  # how rows name the verifier
    judge: Callable[[Execution], Judgment]
    facts: dict[str, Any]  # that a resumed run must find again


def load_task(name: str, *, dim: int, start: str, searches: bool, seconds: float) -> Task:
    """Load a task.

    Args:
        name: `kissing`, or a directory.
        dim: of the kissing number.
        start: a file with the program to start from; empty: the task's own.
        searches: whether the program must have parameters to change (`--proposer mutate`).
        seconds: that a program may take; the prompt says so.

    Raises:
        RlvrError: a file is missing or cannot be read, or verify.py has no function `verify(points)`.
    """
    task = _kissing(dim, searches=searches, seconds=seconds) if name == KISSING else _of_directory(Path(name))
    if start:
        task = replace(task, program=read_text(Path(start), "the program to start from"))
    digests = {key: hashlib.sha256(getattr(task, key).encode()).hexdigest() for key in ("prompt", "program")}
    return replace(task, facts={"name": task.name, **task.facts, **{f"{key}_sha256": v for key, v in digests.items()}})


def _kissing(dim: int, *, searches: bool, seconds: float) -> Task:
    program = (_HERE / "programs" / ("kissing_search.py" if searches else "kissing.py")).read_text(encoding="utf-8")
    prompt = (_HERE / "kissing.md").read_text(encoding="utf-8").format(dim=dim, seconds=seconds)
    return Task(
        name=f"kissing-{dim}",
        prompt=prompt,
        program=program.replace("DIM = 11\n", f"DIM = {dim}\n"),
        grader=KISSING,
        judge=partial(_judge_kissing, dim=dim),
        facts={"dim": dim},
    )


def _judge_kissing(execution: Execution, *, dim: int) -> Judgment:
    verdict = verify_execution(execution, dim=dim)
    valid, gave = verdict.validity == 1.0, execution.status == "ok"
    grade = Grade(None, None, float(verdict.num_points if valid else 0), None, None if valid else verdict.category)
    error = None if valid else storable(verdict.error)
    return Judgment(grade, error, verdict.num_points if gave else None, asdict(verdict))


def _of_directory(folder: Path) -> Task:
    if not folder.is_dir():
        raise RlvrError(
            f"There is no task {str(folder)!r}.",
            "Give kissing, or a directory with prompt.md, program.py and verify.py.",
        )
    spec = f"{folder / 'verify.py'}:verify"
    verify = user_code.load(spec, VERIFIER)
    prompt = read_text(folder / "prompt.md", "the prompt")
    if not prompt.strip():
        raise RlvrError(
            f"{shown(folder / 'prompt.md')} is empty.", "Say in it what is asked, and how a program gives its answer."
        )
    return Task(
        name=storable(folder.resolve().name),
        prompt=prompt,
        program=read_text(folder / "program.py", "the program to start from"),
        grader=spec,
        judge=partial(_judge_by, verify, spec),
        facts={"verify_sha256": user_code.sha256(spec)},
    )


def _judge_by(verify: Callable[[Any], Any], spec: str, execution: Execution) -> Judgment:
    """The judgment of a user's function: a number is the score, a dict has it as `reward` and may have `error`, `failure_kind`, `num_points`."""
    if execution.status != "ok":
        return _judgment(Grade(None, None, 0.0, None, CATEGORIES[execution.status]), execution.message)
    try:
        returned = verify(points_of(execution))
        reward = grade_of(returned).reward or 0.0
        said = (returned if isinstance(returned, dict) else {}) | {"reward": reward}
        said = json.loads(json.dumps(said, default=str), parse_constant=str)  # NaN is none of JSON's numbers
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's own code raises becomes data
        detail = storable(error_detail(error, spec, verify))
        grade = Grade(None, None, None, None, None, type(error).__name__, detail)
        failed = {"error": f"the verifier failed: {type(error).__name__} {detail}"}
        return _judgment(grade, "The verifier failed.", failed)
    kind = None if reward > 0 else storable(str(said.get("failure_kind") or "invalid"))
    message = None if reward > 0 else storable(str(said.get("error") or "The points are not valid."))[:2000]
    count = said.get("num_points")
    judged = _judgment(Grade(None, None, max(reward, 0.0), None, kind), message, said)
    return judged._replace(num_points=count if type(count) is int else None)


def _judgment(grade: Grade, message: str | None, said: Mapping[str, Any] | None = None) -> Judgment:
    common = {"reward": grade.reward, "error": message or "", "failure_kind": grade.failure_kind}
    return Judgment(grade, message, None, {**common, **(said or {})})


def read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RlvrError(f"There is no {shown(path)}: {what}.") from None
    except (OSError, ValueError) as error:
        raise RlvrError(f"Cannot read {what}, {shown(path)}: {error}", "It must be text in UTF-8.") from error
