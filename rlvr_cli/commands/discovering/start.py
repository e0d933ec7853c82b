"""Where a search starts: whether one that is resumed may go on; what its first program scores, and how that competes with the attempts.

Enters: the options; an open run, its task and settings. Leaves: the program's score in run.json, its points in points/, and what the
search knows of it.
"""

from dataclasses import replace

from rlvr_cli.config.discover import DiscoverConfig
from rlvr_cli.discovery.attempts import Known, known_start, run_and_verify, sha256_of
from rlvr_cli.discovery.search import Settings, store_points
from rlvr_cli.discovery.tasks import Task
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.manifest import ROLLOUTS
from rlvr_cli.runs.readers import read_index, resolve_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.terminal import console


def check_length(config: DiscoverConfig) -> None:
    """Raise RlvrError if the search that is resumed has made more rounds than it is to make."""
    path = resolve_run(config.resume, config.runs_dir)
    done = max((entry.step + 1 for entry in read_index(path).entries if entry.folder == ROLLOUTS), default=0)
    if done > config.rounds:
        raise RlvrError(
            f"{path.name} has made {done} rounds already, and is to end after {config.rounds}.",
            f"--rounds must be at least {done}.",
        )


def score_of_start(run: RunDir, task: Task, settings: Settings) -> float | None:
    """The score of the task's own program, measured when the run began; None if it is not valid.

    Raises:
        RlvrError: the verifier fails on it.
    """
    if "start" not in run.metadata:
        trial = run_and_verify(task.program, task, limits=settings.limits, require_sandbox=settings.require_sandbox)
        grade, error = trial.judgment.grade, trial.judgment.error
        if grade.error is not None:
            raise RlvrError(
                f"The verifier fails on the program to start from: {grade.error}: {grade.error_detail}.",
                "Correct verify.py: it must judge whatever a program may give.",
            )
        store_points(run.path, [trial.points])
        found = {
            "score": None if error is not None else grade.reward,
            "error": error,
            "num_points": trial.judgment.num_points,
            "points_sha256": None if trial.points is None else sha256_of(trial.points),
        }
        run.update(start=found)
    start = run.metadata["start"]
    scored = f"not valid: {start['error']}" if start["score"] is None else f"a score of {start['score']:g}"
    console.say(f"start    {scored}")
    return start["score"]


def competing(run: RunDir, task: Task) -> tuple[Known, ...]:
    """The program to start from as attempts compete with it; none if it is not valid, or an earlier version began the search."""
    start = run.metadata["start"]
    points = start.get("points_sha256")
    if points is None:
        return ()
    return (known_start(task.program, score=start["score"], num_points=start["num_points"], points_sha256=points),)


def is_of_earlier_version(run: RunDir) -> bool:
    """Whether an earlier version began the search, which recorded less of the program to start from."""
    return "points_sha256" not in run.metadata["start"]


def as_begun(settings: Settings, run: RunDir) -> Settings:
    """The settings with which the run goes on: a search that an earlier version began keeps its islands and the words of its prompts."""
    if not is_of_earlier_version(run):
        return settings
    return replace(settings, islands=min(settings.islands, settings.num_samples), only_best_is_best=False)
