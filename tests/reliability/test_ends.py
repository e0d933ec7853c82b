"""A process that has done all its work ends with its own exit status: no thread of a library aborts it (status 134)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
V1 = ROOT / "tests/fixtures/v1"
READS = (
    "check grpo",
    "analyze categories grpo",
    "analyze summary eval",
    "analyze report grpo --out report-NUMBER.html",
    "filter eval --out rows-NUMBER.jsonl",
    "grade eval --grader gsm8k --again --grader-workers 1",
)
TRAIN = "--model model --sampling-max-tokens 16 --eval-examples 8 --grader-workers 1"
ALL = (
    *READS,
    "analyze curves grpo --plot curves-NUMBER.png",
    f"sft {TRAIN} --dataset arithmetic:8 --train-batch-size 8 --run sft-NUMBER",
)


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(V1 / "written", tmp_path / "runs")
    shutil.copytree(V1 / "model", tmp_path / "model")
    return tmp_path


def ends(folder, commands, *, count):
    """Return the exit statuses of many processes, status -> count."""
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("many_ends.py")),
            json.dumps([c.split() for c in commands]),
            str(count),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    return {int(status): number for status, number in json.loads(done.stdout).items()}


@pytest.mark.slow
def test_processes_that_read_end_as_they_should(folder):
    assert ends(folder, READS, count=6) == {0: 6}


@pytest.mark.full
def test_2000_ends(folder, figures):
    """A process that has queried, written, plotted or trained ends with status 0"""
    statuses = ends(folder, ALL, count=2000)
    figures |= {"ends": 2000, "aborted": 2000 - statuses.get(0, 0)}
    assert statuses == {0: 2000}
