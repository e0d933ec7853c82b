"""A disk that fills up: every command says so, nothing that was committed is lost, and the status is right.

Each command runs on a small file system (a tmpfs, which root may mount) of which a file leaves a given number of bytes free.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from checks import findings
from factories import a_rollout
from forks import Forks
from killed import EI, assert_readable, go_on, rows_of, weights_of
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import read_metadata, read_rollouts, read_run
from rlvr_cli.runs.run_dir import RunDir

EVAL = shlex.split("eval --dataset arithmetic:200 --num-samples 4 --sampling-max-tokens 16")
SFT = shlex.split("sft --dataset arithmetic:32 --train-batch-size 8 --micro-batch-size 4 --sampling-max-tokens 8 "
                  "--eval-examples 8 --checkpoint-every 1")  # fmt: skip
GRPO = shlex.split(
    "grpo --dataset arithmetic:32 --n-grpo-steps 3 --rollout-batch-size 8 --group-size 4 --train-batch-size 8 "
    "--gradient-accumulation-steps 1 --sampling-max-tokens 8 --eval-examples 8 --checkpoint-every 1"
)
WRITERS = {"eval": EVAL, "sft": SFT, "ei": EI, "grpo": GRPO}
OUTPUTS = {
    "grade": "grade {run} --grader gsm8k",
    "filter": "filter {run} --phase all --where 1=1 --with-control --correct-only --out out.jsonl",
    "report": "analyze report {run} --out page.html",
    "plot": "analyze categories {run} --plot plot.svg",
}
KB = 1024


class SmallDisk:
    """A file system of 48 MB in `path`, and a file on it that takes up what must not be free."""

    def __init__(self, path: Path) -> None:
        self.path, self._ballast = path, path / "ballast"

    def leave(self, free: int) -> None:
        """Leave that many bytes free."""
        self._ballast.unlink(missing_ok=True)
        os.sync()
        room = shutil.disk_usage(self.path).free - free
        if room > 0:
            self._ballast.write_bytes(bytes(room))

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(path)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs takes root")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_said_in_the_status(disk: SmallDisk):
    for free in (40 * KB, 96 * KB, 200 * KB):
        disk.leave(free)
        committed = 0

        def fill(name: str) -> None:
            nonlocal committed
            with RunDir.create(disk.path, "grpo", name=name, metadata={}) as run:
                while True:
                    text = os.urandom(3000).hex()
                    run.commit_rollouts(
                        "train", committed, [a_rollout(run_id=name, phase="train", step=committed, response=text)]
                    )
                    committed += 1

        with pytest.raises(RlvrError, match="No space left"):
            fill(f"r{free}")
        run = disk.path / f"r{free}"
        assert read_run(run).metadata["status"] == "failed"
        assert read_metadata(run)["committed"]["parts"] == committed
        assert read_rollouts(run)["step"].to_pylist() == list(range(committed))
        assert findings(run) == []
        assert not list(run.rglob("*.tmp"))
        disk.empty()
        with RunDir.resume(run) as again:
            assert len(again.committed_keys()) == committed


@pytest.mark.full
@pytest.mark.parametrize("name", WRITERS)
def test_a_run_on_a_disk_of_30_sizes_goes_on_to_the_same_end(
    forks: Forks, disk: SmallDisk, tmp_path: Path, name: str, figures: dict[str, object]
):
    command, whole = WRITERS[name], tmp_path / "runs/whole"
    go_on(forks, whole, command)
    size = sum(p.stat().st_size for p in whole.rglob("*") if p.is_file())
    sizes = [4 * KB * n for n in range(1, 16)] + [64 * KB + size * n // 12 for n in range(15)]
    refused = 0
    for number, free in enumerate(sizes):
        run = disk.path / f"runs/r{number}"
        disk.leave(free)
        done = forks.wait(forks.start(*command, "--run", run.name, cwd=disk.path))
        if done.status:
            refused += 1
            assert done.status == 1, done.said
            assert "No space left on device" in done.said or "are free on that disk" in done.said, done.said
            assert ("--resume" in done.said.split("error: ")[1]) == run.exists() or "--runs-dir" in done.said
            assert not list(run.rglob("*.tmp"))
        if run.exists():
            assert_readable(run)
            assert read_run(run).metadata["status"] == ("failed" if done.status else "finished"), (free, done.said)
        disk.empty()
        go_on(forks, run, command)
        assert read_run(run).metadata["status"] == "finished"
        assert findings(run) == []
        assert rows_of(run, phase="train") == rows_of(whole, phase="train")
        assert len(rows_of(run, phase="eval")) == len(rows_of(whole, phase="eval"))
        if name != "eval":
            assert weights_of(run) == weights_of(whole)
        shutil.rmtree(run)
    assert refused > 5
    figures |= {"command": name, "sizes": len(sizes), "refused": refused, "lost rows": 0, "wrong status": 0}


@pytest.mark.full
@pytest.mark.parametrize("name", OUTPUTS)
def test_output_to_a_disk_of_30_sizes_is_whole_or_absent(
    forks: Forks, disk: SmallDisk, tmp_path: Path, name: str, figures: dict[str, object]
):
    whole = tmp_path / "runs/whole"
    go_on(forks, whole, EVAL)
    command = OUTPUTS[name].format(run="runs/whole").split()

    def outputs() -> dict[str, str]:
        return {
            str(p.relative_to(disk.path)): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(disk.path.rglob("*"))
            if p.is_file() and p.name not in ("ballast", ".lock", "run.json", "manifest.jsonl")
        }

    refused = 0
    sizes = [4 * KB * n for n in range(22)] + [96 * KB * n for n in range(1, 9)]
    shutil.copytree(whole, disk.path / "runs/whole")
    before = outputs()
    for free in sizes:
        disk.leave(free)
        done = forks.wait(forks.start(*command, cwd=disk.path))
        assert done.status in (0, 1)
        if done.status:
            refused += 1
            assert "No space left on device" in done.said, done.said
            assert "--resume" not in done.said.partition("error: ")[2]
            if name != "grade":
                assert outputs() == before
        assert findings(disk.path / "runs/whole") == []
        assert not list(disk.path.rglob("*.tmp"))
        disk.empty()
        shutil.rmtree(disk.path / "runs")
        shutil.copytree(whole, disk.path / "runs/whole")
        for path in disk.path.glob("*.*"):
            path.unlink()
    assert refused
    figures |= {"command": name, "sizes": len(sizes), "refused": refused, "cut or left over": 0}
