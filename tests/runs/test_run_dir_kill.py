"""kill -9 at random times and at every named point of a commit: acknowledged rows are stored once, and the run can be resumed.

The killed program is `kill_writer.py`, which describes the protocol.
"""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import pytest

import factories
import rlvr_cli
from checks import findings
from marks import full, slow
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.readers import read_rollouts, read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.parquet import to_rollouts

WRITER = Path(__file__).with_name("kill_writer.py")
_spec = importlib.util.spec_from_file_location("kill_writer", WRITER)
assert _spec is not None
assert _spec.loader is not None
kill_writer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kill_writer)

# Every fault point that a commit or the creation of a run passes, in files.py, commits.py and run_dir.py.
POINTS = ("create", "write", "write.torn", "rename", "renamed", "manifest", "manifest.torn", "manifest.done")


@dataclass
class Victims:
    """The writer process, and the commits that its children have acknowledged so far, by run."""

    process: subprocess.Popen
    acknowledged: dict[Path, set[tuple[str, ...]]] = field(default_factory=dict)

    def write(
        self,
        run: Path,
        *,
        steps: int | None = None,
        fault: str | None = None,
        kill_after: tuple[int, float] | None = None,
    ) -> int:
        """Let a child write the run to its end, or kill it after (number of acknowledgements, further seconds).

        Returns:
            Its exit status; -9 when it was killed.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"run": str(run), "steps": steps, "fault": fault}) + "\n")
        self.process.stdin.flush()
        acknowledged = self.acknowledged.setdefault(run, set())
        child, count = 0, 0
        while True:
            word, *rest = self.process.stdout.readline().split()
            if word == "dead":
                return int(rest[0])
            if word == "pid":
                child = int(rest[0])
            elif word == "ack":
                acknowledged.add(tuple(rest))
                count += 1
            if child and kill_after is not None and count >= kill_after[0]:
                time.sleep(kill_after[1])
                os.kill(child, signal.SIGKILL)
                kill_after = None


@pytest.fixture(scope="module")
def victims() -> Iterator[Victims]:
    paths = [Path(rlvr_cli.__file__).parents[1], Path(factories.__file__).parent]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(WRITER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield Victims(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=10) == 0


def assert_whole(run: Path, acknowledged: set[tuple[str, ...]]) -> None:
    """Check what readers see: every acknowledged part and metric, no duplicate key, every row as written, all files readable."""
    if not run.exists():
        assert not acknowledged
        return
    rows = to_rollouts(read_rollouts(run))
    keys = Counter((r.phase, r.step, r.example_id, r.sample_index) for r in rows)
    assert set(keys.values()) <= {1}, [k for k, n in keys.items() if n > 1]
    parts = {(r.phase, r.step, r.sample_index // 100) for r in rows}
    expected = {r for phase, step, part in parts for r in _part(run, phase=phase, step=step, part=part)}
    assert set(rows) == expected
    committed = {(phase, str(step), str(part)) for phase, step, part in parts}
    assert {a for a in acknowledged if a[0] != "metrics"} <= committed

    info = read_run(run)
    steps = set()
    if info.metrics is not None:
        query = f"select step from read_parquet('{info.metrics}') where name = 'reward/mean' and value = step / 2"
        found = [row[0] for row in duckdb.connect().execute(query).fetchall()]
        assert len(found) == len(set(found))
        steps = set(found)
    assert {int(a[1]) for a in acknowledged if a[0] == "metrics"} <= steps

    # The directory read with a glob, ignoring the manifest.
    if list((run / "rollouts").glob("*.parquet")):
        query = f"""select count(*), count(distinct (phase, step, example_id, sample_index)), sum(length(response))
                    from read_parquet('{run}/rollouts/*.parquet')"""
        count, distinct, _ = duckdb.connect().execute(query).fetchall()[0]
        assert count == distinct
        assert count >= len(rows)
    assert check_run(run).problems == []


def assert_can_be_resumed(run: Path, acknowledged: set[tuple[str, ...]]) -> None:
    """Check that the run can be resumed without findings and that rows can be added."""
    with RunDir.resume(run) as directory:
        step = 1 + max((s for _, s, _, _ in directory.committed_keys()), default=0)
        directory.commit_rollouts("eval", step, _part(run, phase="eval", step=step, part=0))
        directory.commit_metrics(step, "eval", {"reward/mean": step / 2})
    acknowledged |= {("eval", str(step), "0"), ("metrics", str(step))}
    assert_whole(run, acknowledged)
    assert findings(run) == []
    assert not list(run.rglob("*.tmp"))
    assert not (run / "set-aside").exists()
    assert read_run(run).metadata["status"] == "finished"


def _part(run: Path, *, phase: str, step: int, part: int) -> list:
    return kill_writer.rollouts_of(run.name, phase=phase, step=step, part=part)


def kill_at_random(victims: Victims, root: Path, *, seed: int, runs: int, kills: int) -> None:
    generator = random.Random(seed)
    rows = 0
    for number in range(runs):
        run = root / f"run-{number}"
        for _ in range(kills):
            # Starting at 0 acknowledgements and 0 seconds, so that recovery is killed as well.
            status = victims.write(run, kill_after=(generator.randrange(7), generator.uniform(0.0, 0.03)))
            assert status == -signal.SIGKILL
            assert_whole(run, victims.acknowledged[run])
        if run.exists():
            assert_can_be_resumed(run, victims.acknowledged[run])
            rows += read_rollouts(run, columns=["step"]).num_rows
    assert rows > 10 * runs * kills, "the children were killed before they wrote anything worth a test"


@pytest.mark.parametrize(
    ("runs", "kills"), [pytest.param(2, 8, marks=pytest.mark.slow), pytest.param(10, 20, marks=pytest.mark.full)]
)
def test_killed_at_random_points_nothing_acknowledged_is_lost(victims: Victims, tmp_path: Path, runs: int, kills: int):
    kill_at_random(victims, tmp_path, seed=1, runs=runs, kills=kills)


def killed_and_gone_on(victims: Victims, run: Path, fault: str) -> bool:
    """Kill a writer of one step there, and another in the recovery that follows; what then goes on ends with every row. False if
    the writer did not pass the point so often."""
    if (status := victims.write(run, steps=1, fault=fault)) == 0:
        return False
    assert status == -signal.SIGKILL
    assert_whole(run, victims.acknowledged[run])
    if fault.startswith(("renamed", "manifest.torn")):
        assert victims.write(run, steps=1, fault="manifest.torn:1") in (0, -signal.SIGKILL)
    assert victims.write(run, steps=1) == 0
    assert_whole(run, victims.acknowledged[run])
    expected = {r for phase, part in kill_writer.PARTS for r in _part(run, phase=phase, step=0, part=part)}
    assert set(to_rollouts(read_rollouts(run))) == expected
    assert findings(run) == []
    assert not [name for name in os.listdir(run.parent) if name.startswith(".")], "what a killed creation leaves"
    assert not list(run.rglob("*.tmp"))
    return True


@pytest.mark.parametrize(
    "fault",
    [
        "write.torn:2",
        *(slow(at) for at in ("manifest.torn:3", "create:1", "renamed:4", "manifest.done:2")),
    ],
)
def test_a_run_killed_at_a_point_ends_the_same(victims: Victims, tmp_path: Path, fault: str):
    assert killed_and_gone_on(victims, tmp_path / "run", fault)


@pytest.mark.parametrize("every", [slow(2), full(1)])
@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_at_any_passage_of_a_point_ends_the_same(victims: Victims, tmp_path: Path, point: str, every: int):
    """Of two passages in turn one, from the first or the second one on; in `-m full` at all of them."""
    passage = first = 1 if point == "create" else random.randint(1, every)
    while killed_and_gone_on(victims, tmp_path / f"run-{passage}", f"{point}:{passage}"):
        passage += every
    at_least = {"create": 1, "manifest": 4, "manifest.torn": 4, "manifest.done": 4}.get(point, 7)
    assert passage > at_least, f"{point} was passed fewer than {at_least} times in a whole run, from {first} on"
