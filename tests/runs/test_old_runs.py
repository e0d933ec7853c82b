"""Runs of schema version 1, written by rlvr 0.1.0, can be read, regraded, resumed and trained on with the same results."""

import csv
import hashlib
import json
import math
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlvr_cli.cli import invoke
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.readers import read_rollouts
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.parquet import to_rollouts
from rlvr_cli.runs.storage.schemas import VERSION_KEY
from rlvr_cli.types import SCHEMA_VERSION

V1 = Path(__file__).parents[1] / "fixtures" / "v1"
RUNS = sorted(path.name for path in (V1 / "written").iterdir())
CUT = [name for name in RUNS if name.endswith("-cut")]
SLOW = pytest.mark.slow
RESUMED = json.loads((V1 / "expected/resumed.json").read_text())


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Change to a directory with copies of the model and of all runs."""
    shutil.copytree(V1 / "model", tmp_path / "model")
    shutil.copytree(V1 / "written", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rlvr(place, capsys):
    """Return a function that runs a command and returns its stdout. Avoids `main`, which sets limits on the process."""

    def call(*words):
        capsys.readouterr()
        invoke([*map(str, words)])
        captured = capsys.readouterr()
        (place / "stderr").write_text(captured.err)
        return captured.out

    return call


def rows_of(rlvr, run, table="rollouts"):
    return list(csv.reader(rlvr("analyze", V1 / f"{table}.sql", run, "--format", "csv", "--limit", "0").splitlines()))


def expected_rows(run, table="rollouts"):
    with (V1 / f"expected/{run}/{table}.csv").open(newline="") as file:
        return list(csv.reader(file.read().splitlines()))


def same(found, expected):
    """Whether the rows are equal: later columns may be among a row's, and numbers were perhaps summed in another order."""
    if isinstance(found, float) and isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        kept = {name: found[name] for name in found if name in expected}
        return list(kept) == list(expected) and all(map(same, kept.values(), expected.values()))
    return type(found) is type(expected) and found == expected


def machine():
    """Identify the machine as make.py does."""
    import torch

    kinds = ("model name", "cpu family", "model", "stepping", "flags")
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    processor = "\n".join(line for line in lines if line.partition("\t")[0] in kinds)
    return f"processor {sha256(processor.encode())[:12]}, torch {torch.__version__}"


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def test_there_is_a_run_of_each_kind():
    assert [*RUNS] == sorted(
        ["async-cut", "ei", "ei-cut", "eval", "eval-cut", "grpo", "grpo-cut", "sft", "sft-cut"]
    )  # fmt: skip
    for run in RUNS:
        lines = (V1 / f"written/{run}/manifest.jsonl").read_text().splitlines()
        assert {json.loads(line)["schema_version"] for line in lines} == {1}
    assert sorted(RESUMED["runs"]) == CUT


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=[SLOW] * (run not in ("eval", "grpo-cut", "sft"))) for run in RUNS]
)
def test_every_row_reads_as_before(rlvr, run):
    tables = sorted(path.stem for path in (V1 / f"expected/{run}").glob("*.csv"))
    assert {"rollouts", "runs"} <= {*tables}
    for table in tables:
        assert rows_of(rlvr, run, table) == expected_rows(run, table), table


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        run if run == "grpo" else pytest.param(run, marks=SLOW)
        for run in RUNS
        if [*(V1 / f"expected/{run}").glob("*.json")]
    ],
)
def test_a_named_query_gives_the_same_result(rlvr, run):
    files = sorted((V1 / f"expected/{run}").glob("*.json"))
    assert len(files) > 10
    for file in files:
        query, _, phase = file.stem.partition(".")
        option = ["--phase", phase] if phase else []
        found = json.loads(rlvr("analyze", query, run, "--format", "json", "--limit", "5", *option))
        assert same(found, json.loads(file.read_text())), file.stem


@pytest.mark.parametrize("query", ["compare", "config_diff"])
def test_two_runs_beside_each_other(rlvr, query):
    found = json.loads(rlvr("analyze", query, "sft", "grpo", "--format", "json", "--limit", "5"))
    assert same(found, json.loads((V1 / f"expected/{query}.json").read_text()))


@pytest.mark.parametrize("run", [run if run == "grpo" else pytest.param(run, marks=SLOW) for run in RUNS])
def test_a_report_shows_the_responses(rlvr, place, run):
    rlvr("analyze", "report", run, "--out", "page.html")
    page = (place / "page.html").read_text()
    assert run in page
    header, *rows = expected_rows(run)
    ids = {row[header.index("example_id")] for row in rows}
    assert any(i in page for i in ids)


def test_an_old_run_can_be_regraded(rlvr):
    counts = "select grader, attempt, count(*) as n from grades group by all order by all"
    assert json.loads(rlvr("analyze", counts, "eval", "--format", "json")) == [
        {"grader": "math_verify", "attempt": 0, "n": 32}
    ]
    rlvr("grade", "eval", "--grader", "question_only", "--grader-workers", "1")
    rlvr("grade", "eval", "--grader", "math_verify", "--grader-workers", "1")  # already graded
    rlvr("grade", "eval", "--grader", "math_verify", "--grader-workers", "1", "--again")
    found = json.loads(rlvr("analyze", counts, "eval", "--format", "json"))
    assert [(row["grader"], row["n"]) for row in found] == [("math_verify", 32), ("question_only", 32)]
    assert rows_of(rlvr, "eval") == expected_rows("eval")
    header, *before = expected_rows("eval", "grades")
    _, *after = rows_of(rlvr, "eval", "grades")
    kept = [i for i, name in enumerate(header) if name != "attempt"]
    grader = header.index("grader")
    assert [[row[i] for i in kept] for row in after if row[grader] == "math_verify"] == [
        [row[i] for i in kept] for row in before
    ]


def test_an_old_run_can_be_filtered(rlvr, place):
    header, *rows = expected_rows("grpo")
    correct = [r for r in rows if r[header.index("phase")] == "train" and r[header.index("reward")] == "1.0"]
    assert correct
    rlvr("filter", "grpo", "--correct-only", "--out", "kept.jsonl")
    kept = [json.loads(line) for line in (place / "kept.jsonl").read_text().splitlines()]
    assert sorted(row["response"] for row in kept) == sorted(r[header.index("response")] for r in correct)


def test_an_old_run_can_be_trained_on(rlvr, place):
    rlvr(
        "sft", "--dataset", "runs/grpo", "--model", "runs/grpo/model", "--eval-dataset", "arithmetic", "--eval-examples", 2,
        "--train-batch-size", 32, "--sampling-max-tokens", 16, "--grader-workers", 1, "--run", "learner",
    )  # fmt: skip
    assert (place / "runs/learner/model/model.safetensors").exists()
    header, *rows = rows_of(rlvr, "learner")
    assert {row[header.index("phase")] for row in rows} == {"eval"}


@pytest.mark.parametrize("run", [pytest.param(run, marks=[SLOW] * (run != "grpo-cut")) for run in CUT])
def test_an_old_run_resumes_to_the_same_end(rlvr, place, run):
    expected = RESUMED["runs"][run]
    command = json.loads((place / f"runs/{run}/run.json").read_text())["command"]
    rlvr(command, "--resume", run)

    finished = json.loads((place / f"runs/{run}/run.json").read_text())
    assert (finished["status"], finished["schema_version"]) == ("finished", SCHEMA_VERSION)
    lines, written = ((p / run / "manifest.jsonl").read_bytes() for p in (place / "runs", V1 / "written"))
    assert lines.startswith(written)
    versions = [json.loads(line)["schema_version"] for line in lines.splitlines()]
    assert set(versions) == {1, SCHEMA_VERSION}
    assert versions == sorted(versions)
    assert check_run(place / "runs" / run).problems == []
    masks = "SELECT count(response_mask), typeof(any_value(response_mask)), count(turns) FROM rollouts"
    assert rlvr("analyze", masks, run, "--format", "csv").splitlines()[1] == "0,BOOLEAN[],0"
    header, *rows = rows_of(rlvr, run)
    assert [row for row in expected_rows(run) if row not in [header, *rows]] == []
    for path in (V1 / f"written/{run}/rollouts").iterdir():
        assert (place / f"runs/{run}/rollouts/{path.name}").read_bytes() == path.read_bytes()

    said = [
        [r["phase"], r["step"], r["example_id"], r["sample_index"], r["response"], r["reward"]]
        for r in json.loads(rlvr("analyze", V1 / "rollouts.sql", run, "--format", "json", "--limit", "0"))
    ]
    assert len(said) == expected["rows"]
    assert sha256(json.dumps([row[:4] for row in said]).encode()) == expected["keys"]
    weights = place / f"runs/{run}/model/model.safetensors"
    assert weights.exists() == (expected["weights"] is not None)
    if machine() == RESUMED["machine"]:
        assert sha256(json.dumps(said).encode()) == expected["responses"]
        assert not weights.exists() or sha256(weights.read_bytes()) == expected["weights"]


def test_an_uncommitted_part_is_adopted_with_its_own_version(place):
    run = place / "runs/eval-cut"
    *lines, last = (run / "manifest.jsonl").read_text().splitlines(keepends=True)
    (run / "manifest.jsonl").write_text("".join(lines))
    with RunDir.resume(run) as resumed:
        assert len(resumed.notices) == 1
    assert (run / "manifest.jsonl").read_text() == "".join([*lines, last])
    assert to_rollouts(read_rollouts(run)) == to_rollouts(read_rollouts(V1 / "written/eval-cut"))


@pytest.mark.parametrize("open_it", [RunDir.resume, RunDir.annotate])
def test_an_uncommitted_part_of_a_newer_version_is_left_alone(place, open_it):
    run = place / "runs/eval-cut"
    before = {p: p.read_bytes() for p in run.rglob("*.parquet")}
    table = pq.read_table(run / "rollouts/eval-000000-0000.parquet").replace_schema_metadata({VERSION_KEY: "1000"})
    newer = run / "rollouts/eval-000000-0002.parquet"
    pq.write_table(table, newer)
    with pytest.raises(RlvrError, match=r"eval-000000-0002\.parquet was written by a newer rlvr") as caught:
        open_it(run)
    assert "Upgrade" in caught.value.hint
    assert newer.exists()
    assert {p: p.read_bytes() for p in before} == before


def test_annotating_an_old_run_changes_only_its_schema_version_and_what_protects_it(place):
    before = json.loads((place / "runs/eval/run.json").read_text())
    with RunDir.annotate(place / "runs/eval"):
        pass
    after = json.loads((place / "runs/eval/run.json").read_text())
    assert after.pop("sha256")
    assert after.pop("committed")["parts"] == len(list((place / "runs/eval").glob("*/*.parquet")))
    assert after == before | {"schema_version": SCHEMA_VERSION}


@SLOW  # one that was cut goes on, too
def test_a_finished_old_run_can_be_extended(rlvr, place):
    rlvr("grpo", "--resume", "grpo", "--n-grpo-steps", "4")
    header, *before = expected_rows("grpo")
    after = rows_of(rlvr, "grpo")
    assert [row for row in before if row not in after] == []
    step, phase = header.index("step"), header.index("phase")
    assert {row[step] for row in after[1:] if row[phase] == "train"} == {"0", "1", "2", "3"}
    assert len([row for row in after[1:] if row[phase] == "train"]) == 4 * 16
    assert {row[step] for row in after[1:] if row[phase] == "eval"} == {"0", "2", "3", "4"}
