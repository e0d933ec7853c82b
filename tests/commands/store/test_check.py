"""`rlvr check`: a byte that is not as it was committed is found wherever it lies, and a run under way is no damage."""

import json
import shutil
from pathlib import Path

import pytest

from checks import findings
from factories import a_grade, a_rollout
from rlvr_cli.errors import RlvrError
from rlvr_cli.rollouts.requests import request_seed
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.training import checkpoints

ROOT = Path(__file__).parents[3]
WRITTEN = ROOT / "tests/fixtures/v1/written"


@pytest.fixture
def check(forks, tmp_path):
    """The command, whose exit status counts."""
    return lambda *words: forks.run("check", *words, cwd=tmp_path)


@pytest.fixture
def run(tmp_path):
    """A training run with rollouts, metrics and a checkpoint."""
    return Path(shutil.copytree(WRITTEN / "grpo-cut", tmp_path / "grpo-cut"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def files_of(run: Path) -> list[Path]:
    """All files with a sha256 of their own."""
    found = [*run.glob("rollouts/*.parquet"), run / "metrics.parquet", *run.glob("checkpoints/step-*/**/*")]
    return sorted(path for path in found if path.is_file())


def test_an_intact_run(run, check):
    result = check(run)
    assert (result.status, result.out) == (
        0,
        f"every byte of {len(files_of(run))} files is as it was committed; the keys, seeds and steps of 48 rollouts fit\n",
    )
    as_json = check(run.name, "--runs-dir", run.parent, "--format", "json")
    assert (as_json.status, json.loads(as_json.out)) == (0, [])


@pytest.mark.parametrize("pattern", ["rollouts/eval-*", "checkpoints/*/model/model.safetensors"])
def test_one_flipped_byte(run, pattern, check):
    path = sorted(run.glob(pattern))[0]
    flip(path)
    result = check(run, "--format", "json")
    assert result.status == 1
    assert "error:" in result.err
    assert "1 problem." in result.err
    ((key, text),) = json.loads(result.out)[0].items()
    assert key == "problem"
    assert str(path) in text
    assert "sha256" in text


def test_a_flipped_byte_is_found_in_every_file(run):
    """Each file in turn, by what the command calls."""
    for path in files_of(run):
        before = path.read_bytes()
        flip(path)
        files, damaged = checkpoints.check_checkpoints(run)
        assert [p for p in check_run(run).problems + damaged if str(path) in p], path
        path.write_bytes(before)
    files, damaged = checkpoints.check_checkpoints(run)
    assert (findings(run), damaged) == ([], [])
    assert check_run(run).files + files == len(files_of(run))


def test_a_missing_part(run, check):
    path = sorted(run.glob("rollouts/train-*"))[0]
    path.unlink()
    result = check(run)
    assert result.status == 1
    assert str(path) in result.out
    assert "No such file" in result.out


def test_a_run_that_is_being_written(run, check):
    """A part whose commit is under way is no damage, and the writer's lock is not in the way."""
    with RunDir.resume(run):
        shutil.copy(sorted(run.glob("rollouts/eval-*"))[0], run / "rollouts/eval-000999-0000.parquet")
        result = check(run)
    assert result.status == 0, result.err
    assert "every byte of" in result.out
    assert "eval-000999-0000.parquet is not in the manifest: its commit is in progress" in result.err


def test_a_checkpoint_that_is_pruned_meanwhile_is_no_damage(run, monkeypatch):
    (path,) = run.glob("checkpoints/step-*")

    def pruned(*_: object, **__: object) -> None:
        shutil.rmtree(path)
        raise RlvrError("state.json is missing")

    monkeypatch.setattr(checkpoints, "_verified", pruned)
    assert checkpoints.check_checkpoints(run) == (0, [])


def test_no_run(tmp_path, check):
    result = check("nothing", "--runs-dir", tmp_path)
    assert result.status == 1
    assert "no run 'nothing'" in result.err


def test_what_the_rows_say_is_checked(tmp_path):
    """Rows that have the right sums, but cannot be: a seed that is not that of its key, a later policy, an earlier step."""

    def row(step: int, index: int, **changes: object):
        seed = request_seed(7, phase="train", step=step, example_id="q0", sample_index=index)
        return a_rollout(**{"phase": "train", "step": step, "sample_index": index, "seed": seed} | changes)

    with RunDir.create(tmp_path, "grpo", name="r", metadata={"seed": 7}) as run:
        run.commit_rollouts("train", 4, [row(4, 0), row(4, 1)])
        for step in (0, 1, 3):
            run.commit_metrics(step, "train", {"update/tokens": 1.0})
        run.commit_rollouts("train", 5, [row(5, 0, seed=8), row(5, 1, policy_version=6)])
        run.commit_rollouts("train", 2, [row(2, 0)])
    problems = check_run(run.path, seed_of=request_seed).problems
    metrics, part, before = run.path / "metrics.parquet", "train-000005-0000.parquet", "train-000002-0000.parquet"
    rollouts = run.path / "rollouts"
    assert problems == [
        f"{metrics} has no metrics of update 2.",
        f"{rollouts / part} has rows that a later policy sampled.",
        f"{rollouts / part} has 1 rows with a seed that is not the one of their key.",
        f"{rollouts / before} was committed after rollouts/{part}, a later step.",
    ]


@pytest.mark.parametrize(
    ("logged", "done", "status", "lost"),
    [
        (range(4), 4, "finished", []),
        ((), 0, "finished", []),
        ((2, 3), 4, "finished", ["updates 0 to 1"]),
        ((1, 2), 4, "diverged", ["update 0", "update 3"]),
        ((), 10**30, "finished", [f"updates 0 to {10**30 - 1}"]),
        ((), "4", "finished", []),
        ((2, 3), 4, "failed", []),  # while the run goes on, it may have fewer
    ],
)
def test_lost_metrics_of_an_ended_run_are_named(tmp_path, logged, done, status, lost):
    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        for step in logged:
            run.commit_metrics(step, "train", {"update/tokens": 1.0})
        run.update(updates=done)
        run.finish(status)
    found = check_run(run.path)
    assert (found.problems, found.pending) == (
        [],
        [f"{run.path}/metrics.parquet has no metrics of {of}." for of in lost],
    )


def test_a_finished_run_whose_metrics_started_over(tmp_path, check):
    run = Path(shutil.copytree(WRITTEN / "grpo", tmp_path / "grpo"))
    (run / "metrics.parquet").unlink()
    RunDir.annotate(run).close()
    result = check(run)
    assert (result.status, f"{run}/metrics.parquet has no metrics of updates 0 to 2.\n" in result.err) == (0, True)


def test_a_manifest_that_disagrees_with_its_parts(run):
    """The sums fit, the numbers beside them do not; the run was killed, so that run.json records nothing."""
    manifest = run / "manifest.jsonl"
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    part = next(line for line in lines if line["path"].startswith("rollouts/"))
    part["rows"] += 1
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (problem,) = check_run(run).problems
    assert f"{part['path']} has {part['rows'] - 1} rows, but the manifest says {part['rows']}" in problem


def test_grades_of_rollouts_that_are_not_there(tmp_path):
    with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
        run.commit_rollouts("eval", 0, [a_rollout()])
        run.commit_grades("eval", 0, [a_grade(), a_grade(example_id="q1")])
    (problem,) = check_run(run.path).problems
    assert "for rollouts that are not in it, first for q1" in problem


def test_several_runs_are_all_checked(tmp_path, check):
    """A damaged one does not keep the others from being checked."""
    for name in ("a", "b", "c"):
        with RunDir.create(tmp_path, "eval", name=name, metadata={}) as run:
            run.commit_rollouts(
                "eval",
                0,
                [a_rollout(run_id=name, seed=request_seed(0, phase="eval", step=0, example_id="q0", sample_index=0))],
            )
    (tmp_path / "notes.txt").write_text("no run")
    assert check("*", "--runs-dir", ".").status == 0
    flip(next((tmp_path / "b" / "rollouts").iterdir()))
    result = check("*", "--runs-dir", ".")
    assert result.status == 1
    assert result.out.count("every byte of 1 files") == 2
    assert "error: b is not as it was committed: 1 problem." in result.err
    assert "error: 1 of 3 runs are not as they were committed." in result.err
    assert "passed over, since no run: notes.txt" in result.err
    assert "is for one run" in check("a", "c", "--runs-dir", ".", "--format", "json").err
