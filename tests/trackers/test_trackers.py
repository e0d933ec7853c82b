"""Trackers: what they have of a run is what metrics.parquet says, once each, and none of them can delay or end a run.

The real packages write offline, and their own readers read it back. A package of the tests stands in for one that fails or hangs.
"""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import tracked as readers
from factories import a_rollout
from marks import slow
from rlvr_cli.cli import invoke
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs import readers as readers_of_runs
from rlvr_cli.runs.manifest import parse_manifest
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.remote.index import local_files
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.trackers import open as opening
from rlvr_cli.trackers.children import Children, tracked
from rlvr_cli.trackers.rows import Row, Samples, complete_rows
from rlvr_cli.trackers.sent import Recorded

ROOT = Path(__file__).parents[2]
REAL = [
    pytest.param(
        name,
        marks=[
            pytest.mark.skipif(not importlib.util.find_spec(name), reason=f"needs the extra {name}"),
            *([] if name == "tensorboard" else [pytest.mark.slow]),
        ],
    )
    for name in ("tensorboard", "wandb", "trackio")
]
CHECKPOINT = "train/checkpoint/seconds"  # that after the last update is not sent
TEXTS = ("eval/samples", "config")  # beside the numbers


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def write_steps(run: RunDir, steps, *, seconds=1.0) -> None:
    """Evaluations at every second step, and training steps with a metric that is no number at step 1."""
    for step in steps:
        if step % 2 == 0:
            run.commit_rollouts(
                "eval", step, [a_rollout(run_id=run.id, step=step, example_id=f"q{i}") for i in range(12)]
            )
            run.commit_metrics(step, "eval", {"reward/mean": 1 / (step + 3), "reward/samples": 12.0})
        loss = math.nan if step == 1 else -step / 7
        timing = {"update/seconds": seconds + step, "update/skipped": 0.0}
        run.commit_metrics(step, "train", {"reward/mean": step / 9, "loss/policy": loss} | timing)


def truth(run: Path) -> dict[tuple[str, int], float]:
    rows = pq.read_table(run / "metrics.parquet").to_pylist()
    return {(f"{r['phase']}/{r['name']}", r["step"]): r["value"] for r in rows}


def read_back(name: str, run: Path) -> readers.Points:
    script = ROOT / "tests/helpers/tracked.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, name, run], capture_output=True, text=True, check=True
    )
    return {(tag, step): values for tag, step, values in json.loads(done.stdout.splitlines()[-1])}


def numbers(points: readers.Points) -> dict[tuple[str, int], float]:
    """The metrics, of which each is there once."""
    assert {key: len(values) for key, values in points.items() if len(values) != 1} == {}
    kept = {k: v[0] for k, v in points.items() if not k[0].startswith(TEXTS) and not k[0].endswith("/wall_seconds")}
    return kept


def export(run: Path, name: str, *options: str, status: int = 0) -> str:
    """Call the command in a process of its own, as the packages leave threads behind."""
    command = [sys.executable, "-m", "rlvr_cli", "export", str(run), "--to", name, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=run.parents[1], check=False)
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    return done.stderr


def same(a: float, b: float, *, name: str) -> bool:
    kind = np.float32 if name == "tensorboard" else np.float64
    return bool(np.array_equal(kind(a), kind(b), equal_nan=True))


# What is sent


def test_rows_are_complete_and_in_order(tmp_path):
    """The last batch may get more metrics, and so may not be sent while the run goes on, nor may what comes after it."""
    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        run.commit_metrics(0, "eval", {"reward/mean": 0.5})
        assert [(r.axis, r.step) for r in complete_rows(read_run(run.path))] == [("eval", 0)]
        run.commit_metrics(0, "train", {"reward/mean": 0.25})
        run.commit_metrics(1, "train", {"update/skipped": 0.0})  # the second update on this batch
        assert [(r.axis, r.step) for r in complete_rows(read_run(run.path))] == [("eval", 0)]
        run.commit_metrics(2, "train", {"checkpoint/seconds": 1.0})
        run.commit_metrics(2, "eval", {"reward/mean": 0.75})
        assert [(r.axis, r.step) for r in complete_rows(read_run(run.path))] == [("eval", 0)]
        run.commit_metrics(2, "train", {"reward/mean": 0.5})
        run.commit_metrics(0, "train", {"step/seconds": 9.0})
        rows = complete_rows(read_run(run.path))
        assert [(r.axis, r.step) for r in rows] == [("eval", 0), ("train", 0), ("train", 1), ("eval", 2)]
        assert rows[1].values == {"reward/mean": 0.25, "step/seconds": 9.0}
    rows = complete_rows(read_run(tmp_path / "r"))
    assert [(r.axis, r.step) for r in rows[4:]] == [("train", 2)]
    with RunDir.resume(tmp_path / "r") as run:
        run.commit_metrics(3, "train", {"checkpoint/seconds": 1.0})  # step 3 has not begun
    assert complete_rows(read_run(tmp_path / "r")) == rows
    assert [r.rank for r in rows] == sorted({r.rank for r in rows})
    assert Row("eval", 3, 2.0, {"a/b": 1.0}).named() == {"eval/a/b": 1.0, "eval/wall_seconds": 2.0, "eval_step": 3.0}


def test_the_last_batch_of_a_run_that_failed_waits_for_it_to_be_resumed(tmp_path):
    """Its update ran out of memory, say; what is sent once keeps its value in W&B and Trackio."""
    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        run.commit_metrics(0, "train", {"reward/mean": 0.25, "update/skipped": 0.0})
        run.commit_metrics(1, "train", {"reward/mean": 0.5})
        run.finish("failed")
    assert [r.step for r in complete_rows(read_run(run.path))] == [0]
    with RunDir.resume(run.path) as run:
        run.commit_metrics(1, "train", {"reward/mean": 0.5, "update/skipped": 0.0})
    assert "update/skipped" in complete_rows(read_run(run.path))[1].values


def test_without_rollouts_the_last_update_waits(tmp_path):
    with RunDir.create(tmp_path, "sft", name="r", metadata={}) as run:
        for step in range(3):
            run.commit_metrics(step, "train", {"update/skipped": 0.0})
        assert [r.step for r in complete_rows(read_run(run.path))] == [0, 1]


def test_the_same_questions_are_shown_each_time(tmp_path, monkeypatch):
    parsed = []

    def counted(*arguments, **given):
        parsed.append(arguments)
        return parse_manifest(*arguments, **given)

    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        write_steps(run, range(3))
        rows = complete_rows(read_run(run.path))
        monkeypatch.setattr(readers_of_runs, "parse_manifest", counted)
        samples = Samples(run.path)
        shown = {row.step: samples.of(row) for row in rows if row.axis == "eval"}
    assert len(parsed) == 1, "of a long run it takes longer than the rows"
    assert (
        [cells[0] for cells in shown[0]]
        == [cells[0] for cells in shown[2]]
        == ["q0", "q1", "q10", "q11", *map("q{}".format, range(2, 6))]
    )
    assert samples.of(Row("train", 0, 0.0, {"reward/mean": 1.0})) == []


@pytest.mark.parametrize("name", REAL)
@pytest.mark.slow
def test_an_exported_run_is_read_back(tmp_path, name):
    """Each number once; exported again, nothing is sent twice, and a run that has gone on is sent on."""
    with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata={"config": {"learning_rate": 1e-5}}) as run:
        write_steps(run, range(5))
    assert "5 rows of training, 3 of evaluations" in export(run.path, name)
    assert not [path for path in run.path.glob("wandb/*") if path.is_symlink()]
    assert list(local_files(run.path)), "what a tracker has put there does not keep the run from being uploaded"
    points = read_back(name, run.path)
    found = numbers(points)
    assert found.keys() == truth(run.path).keys()
    assert [key for key, value in truth(run.path).items() if not same(found[key], value, name=name)] == []
    texts = {step for tag, step in points if tag.startswith("eval/samples")}
    assert texts == {0, 2, 4}
    with RunDir.resume(run.path) as run:  # it repeats step 4, whose seconds are other ones, and goes on
        write_steps(run, [5, 6])
        run.commit_metrics(4, "train", {"update/seconds": 77.0})
    export(run.path, name)
    found, now = numbers(read_back(name, run.path)), truth(run.path)
    assert found.keys() == now.keys()
    first_wins = set() if name == "tensorboard" else {("train/update/seconds", 4)}
    assert {key for key, value in now.items() if not same(found[key], value, name=name)} == first_wins


def test_csv(tmp_path):
    with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata={}) as run:
        write_steps(run, range(3))
    invoke(["export", str(run.path), "--to", "csv"])
    lines = [line.split(",") for line in (run.path / "csv" / "train.csv").read_text().splitlines()]
    assert lines[0] == ["step", "wall_seconds", "loss/policy", "reward/mean", "update/seconds", "update/skipped"]
    assert [(line[0], float(line[3])) for line in lines[1:]] == [("0", 0.0), ("1", 1 / 9), ("2", 2 / 9)]
    assert (run.path / "csv" / "eval.csv").read_text().splitlines()[1].startswith("0,")


@pytest.mark.parametrize("steps", [0, 1])  # one without metrics, too: the old tables would pass for its own
def test_a_folder_of_out_is_of_one_run(tmp_path, monkeypatch, steps):
    with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata={}) as run:
        write_steps(run, range(2))
    words, folder = ["export", "r", "--to", "csv", "--out", "out"], tmp_path / "out" / "r"
    monkeypatch.chdir(tmp_path)
    invoke(words)
    with RunDir.resume(run.path) as resumed:
        write_steps(resumed, range(2, 3))
    invoke(words)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files["train.csv"].count(b"\n") == 4
    run.path.rename("runs/old")
    with RunDir.create("runs", "grpo", name="r", metadata={}) as other:
        write_steps(other, range(1, 1 + steps))  # without an evaluation
    begun = [of.metadata["created_at"] for of in (run, other)]
    with pytest.raises(RlvrError) as raised:
        invoke(words)
    assert str(raised.value) == (
        f"out/r has the metrics of another run: r, created at {begun[0]}; runs/r is r, created at {begun[1]}.\n"
        "Give another --out, or remove the folder."
    )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    (folder / ".run").unlink()  # as in a folder of an earlier version
    invoke(words)
    tables = {path.name: path.read_text().count("\n") for path in folder.glob("*.csv")}
    assert tables == ({"train.csv": 2} if steps else {"train.csv": 4, "eval.csv": 3})


def test_files_go_where_out_says(tmp_path, capsys, monkeypatch):
    for name in ("a", "b"):
        with RunDir.create(tmp_path / "runs", "grpo", name=name, metadata={}) as run:
            write_steps(run, range(3))
    before = sorted((tmp_path / "runs").rglob("*"))
    out = tmp_path / "new" / "out"
    pattern = ["a", "b", "--runs-dir", str(tmp_path / "runs")]
    invoke(["export", *pattern, "--to", "csv", "--out", str(out)])
    for name in ("a", "b"):
        assert (out / name / "train.csv").read_text().count("\n") == 4
    assert sorted((tmp_path / "runs").rglob("*")) == before, "nothing is written into the runs"
    with pytest.raises(RlvrError, match="wandb has a place of its own"):
        invoke(["export", *pattern, "--to", "wandb", "--out", str(out)])
    with RunDir.create(tmp_path / "others", "grpo", name="a", metadata={}) as other:
        write_steps(other, range(3))
    with pytest.raises(RlvrError, match=r"the same name.*\nExport them apart, each with an --out of its own"):
        invoke(["export", *pattern, str(other.path), "--to", "csv", "--out", str(out)])
    renamed = other.path.rename(tmp_path / "others" / "a-old")  # its run_id is still a
    of_a = (out / "a" / "train.csv").read_bytes()
    capsys.readouterr()
    monkeypatch.chdir(renamed)
    for name in (renamed, "."):
        invoke(["export", str(name), "--to", "csv", "--out", str(out)])
        assert f"a-old: 3 rows of training, 2 of evaluations; csv: in {out / 'a-old'}\n" in capsys.readouterr().err
    assert (out / "a" / "train.csv").read_bytes() == of_a
    assert sorted(path.name for path in out.iterdir()) == ["a", "a-old", "b"]


@pytest.mark.slow
def test_tensorboard_goes_where_out_says(tmp_path):
    pytest.importorskip("tensorboard")
    with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata={}) as run:
        write_steps(run, range(3))
    for _ in range(2):  # nothing is there twice
        invoke(["export", str(run.path), "--to", "tensorboard", "--out", str(tmp_path / "out")])
    (tmp_path / "out" / "r").rename(run.path / "tensorboard")
    assert numbers(read_back("tensorboard", run.path)).keys() == truth(run.path).keys()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--to csv --track-project p", "--track-project is for W&B and Trackio"),
        ("--to s3://bucket/runs --track-project p", "--track-project is for W&B and Trackio"),
        ("--to s3://bucket/runs --out tables", "s3://bucket/runs has a place of its own"),
    ],
)
def test_options_that_would_do_nothing_are_refused(words, says):
    with pytest.raises(RlvrError, match=says):
        invoke(["export", "r", *words.split()])


def test_the_rest_is_sent_by_a_command_that_is_taken():
    assert opening.later(Path("r"), "csv", "p") == "rlvr export r --to csv"
    assert opening.later(Path("r"), "wandb", "p") == "rlvr export r --to wandb --track-project p"


def test_bad_exports_are_errors(tmp_path, monkeypatch):
    with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata={}) as run:
        write_steps(run, range(2))
    with pytest.raises(RlvrError, match="Nothing says where to"):
        invoke(["export", str(run.path)])
    with pytest.raises(RlvrError, match=r"--to is 'wanb'\. Did you mean wandb"):
        invoke(["export", str(run.path), "--to", "wanb"])
    monkeypatch.setitem(opening.TRACKERS, "csv", opening.Kind("csv_tables", "Csv", "no_such_package"))
    with pytest.raises(RlvrError, match="no_such_package is not installed") as raised:
        invoke(["export", str(run.path), "--to", "csv"])
    assert "pip install -e '.[no_such_package]'" in raised.value.hint


def test_two_processes_never_send_one_run_at_once(tmp_path):
    with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata={}) as run:
        write_steps(run, range(2))
    info = read_run(run.path)
    with (
        opening.open_tracker("csv", info, project="", live=False, patience=0.0),
        pytest.raises(RlvrError, match="Another process sends"),
        opening.open_tracker("csv", info, project="", live=False, patience=0.2),
    ):
        pass


@pytest.mark.parametrize("name", ["csv", REAL[0]])
def test_two_processes_never_write_one_folder_of_out_at_once(tmp_path, name):
    infos = []
    for root in ("runs", "others"):
        with RunDir.create(tmp_path / root, "grpo", name="r", metadata={}) as run:
            write_steps(run, range(2))
        infos.append(read_run(run.path))
    out = tmp_path / "out"
    opened = partial(opening.open_tracker, project="", live=False, patience=0.0, out=out)
    with (
        opened("csv", infos[0]),
        pytest.raises(RlvrError, match=f"Another process sends metrics to {out}"),
        opened(name, infos[0]),
    ):
        pass
    with (  # which `rlvr export` has looked for before, when the folder was not there yet
        pytest.raises(RlvrError, match="has the metrics of another run"),
        opened(name, infos[1]),
    ):
        pass


# What has not arrived


WANDB = """
import json, os
class Settings:
    def __init__(self, **given):
        assert given["symlink"] is False
class Table:
    def __init__(self, columns, data):
        pass
def init(*, project, resume, **given):
    assert resume == "allow"
    return Run(os.path.join(os.environ["SERVER"], project))
class Run:
    url, offline, disabled = "https://wandb.test/r", False, False
    def __init__(self, path):
        self.path, self.queue = path, []
        lines = open(path).read().splitlines() if os.path.exists(path) else []
        self.starting_step = json.loads(lines[-1])[0] + 1 if lines else 0
    def define_metric(self, *names, **given):
        pass
    def log(self, values, step):
        self.queue.append([step, dict(values)])
    def finish(self, exit_code):
        most = os.environ.get("TAKES")
        with open(self.path, "a") as file:
            file.writelines(json.dumps(row, default=repr) + chr(10) for row in self.queue[: most and int(most)])
        if most:
            raise OSError("the net is down")
"""


@pytest.fixture
def server(tmp_path, monkeypatch) -> Path:
    """Installs a package `wandb` that sends at its end, as far as the server TAKES it; gives the folder with a file for each project."""
    for name, content in (("packages/wandb.py", WANDB), ("server/none", "")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'packages'}:{ROOT}")
    monkeypatch.setenv("SERVER", str(tmp_path / "server"))
    monkeypatch.setenv("WANDB_MODE", "online")
    return tmp_path / "server"


@pytest.mark.slow
def test_export_sends_what_wandb_has_not_received(tmp_path, server, monkeypatch):
    with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata={}) as run:
        write_steps(run, range(5))
    monkeypatch.setenv("TAKES", "3")
    said = export(run.path, "wandb", status=1)
    assert "wandb did not take r: OSError: the net is down" in said
    monkeypatch.delenv("TAKES")
    assert "r: 3 rows of training, 2 of evaluations; 3 were there; wandb: https" in export(run.path, "wandb")
    assert numbers(sent_to(server / "rlvr")).keys() == truth(run.path).keys()
    assert "r: 0 rows of training, 0 of evaluations; 8 were there" in export(run.path, "wandb")
    assert "r: 5 rows of training, 3 of evaluations; wandb" in export(run.path, "wandb", "--track-project", "other")
    assert numbers(sent_to(server / "other")).keys() == truth(run.path).keys()
    (server / "rlvr").unlink()
    assert "r: 5 rows of training, 3 of evaluations; wandb" in export(run.path, "wandb")


@pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="needs the extra wandb")
@pytest.mark.parametrize("place", ["wandb", "home/wandb"])
@pytest.mark.slow
def test_wandb_that_a_settings_file_keeps_offline_writes_each_row_once(tmp_path, monkeypatch, place):
    """As `wandb offline` writes it, in the working directory; or for the user."""
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home/wandb"))
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "settings").write_text("[default]\nmode = offline\n")
    with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata={}) as run:
        write_steps(run, range(2))
    said = export(run.path, "wandb")
    assert "r: 2 rows of training, 1 of evaluations; wandb: offline; send it with: wandb sync" in said
    assert "r: 0 rows of training, 0 of evaluations; 3 were there" in export(run.path, "wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "r: 0 rows of training, 0 of evaluations; 3 were there" in export(run.path, "wandb"), "the same place"


def test_each_place_of_trackio_has_the_whole_run_once(tmp_path, stand_in, monkeypatch, capfd):
    stand_in()
    with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata={}) as run:
        write_steps(run, range(3))
    whole, nothing = (
        "r: 3 rows of training, 2 of evaluations; trackio",
        "r: 0 rows of training, 0 of evaluations; 5 were",
    )

    def said(*options: str) -> str:
        invoke(["export", str(run.path), "--to", "trackio", *options])
        return capfd.readouterr().err

    assert whole in said()
    assert nothing in said("--track-project", "rlvr")
    assert whole in said("--track-project", "other")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "elsewhere"))
    assert whole in said()
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://me:word@trackio.test/?write_token=secret")
    assert whole in said()
    assert nothing in said()
    record = (run.path / "trackers" / "trackio.json").read_text()
    assert "http://***@trackio.test/" in record
    assert "secret" not in record


def test_runs_of_one_name_stay_apart_in_trackio_and_what_is_no_longer_there_is_sent_again(tmp_path, stand_in, capfd):
    """Sweeps give their runs the same names; and what was deleted in Trackio's own directory is seen to be gone."""
    logged = stand_in()
    paths = []
    for folder in ("a", "b"):
        with RunDir.create(tmp_path / folder, "grpo", name="r", metadata={}) as run:
            write_steps(run, range(1))
        paths.append(run.path)

    def said(run: Path) -> str:
        invoke(["export", str(run), "--to", "trackio"])
        return capfd.readouterr().err

    def names() -> list[str]:
        return [json.loads(line)[-1] for line in Path(f"{logged}.runs").read_text().splitlines()]

    assert "r: 1 rows of training, 1 of evaluations" in said(paths[0])
    other = said(paths[1])
    assert "r: 1 rows of training, 1 of evaluations" in other
    first, second = names()
    assert first == "r"
    assert second.startswith("r-")
    assert f"there its name is {second}, as another run is named r" in other
    for run in paths:
        assert "r: 0 rows of training, 0 of evaluations; 2 were there" in said(run)
    Path(f"{logged}.runs").unlink()
    for run in paths:
        assert "r: 1 rows of training, 1 of evaluations" in said(run)
    assert names() == [first, second]


@pytest.mark.parametrize(
    ("config", "has_it"),
    [
        ({"track": ["trackio"], "track_project": "a"}, {"a"}),
        ({"track": ["trackio"]}, {""}),
        ({"track": ["wandb"]}, {"a", "b", ""}),
    ],
)
def test_a_record_of_an_earlier_version_is_of_the_place_that_the_run_names(tmp_path, config, has_it):
    with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata={"config": config}) as run:
        write_steps(run, range(3))
    info = read_run(run.path)
    rows = complete_rows(info)
    for project in ("a", "b", ""):
        (run.path / "trackers").mkdir(exist_ok=True)
        (run.path / "trackers" / "trackio.json").write_text('{"rank": 3}')

        def sent(project: str) -> Recorded:
            return Recorded(info, "trackio", project=project, place=lambda name: f"at {name}")

        assert [row.rank for row in sent(project).left(rows)] == ([4, 5] if project in has_it else [0, 1, 3, 4, 5])
        sent(project).record(rows)
        assert sent(project).left(rows) == []
        if (project, has_it) == ("b", {"a"}):
            assert [row.rank for row in sent("a").left(rows)] == [4, 5], "what is known of other places is kept"


# A run and its trackers


STAND_IN = """
import json, os, time
def runs():
    with open(os.environ["LOGGED"] + ".runs", "a+") as file:
        file.seek(0)
        return file.read().splitlines()
def init(*, project, name, resume, **given):
    {init}
    place = json.dumps([os.environ["TRACKIO_DIR"], os.environ.get("TRACKIO_SERVER_URL"), project, name])
    if resume == "must" and place not in runs():
        raise ValueError(f"Run '{{name}}' does not exist in project '{{project}}'")
    return Run(place)
class Run:
    def __init__(self, place):
        self.place = place
    def log(self, values, step):
        {log}
        with open(os.environ["LOGGED"], "a") as file:
            file.write(json.dumps([step, dict(values)], default=repr) + chr(10))
        if self.place not in runs():
            with open(os.environ["LOGGED"] + ".runs", "a") as file:
                file.write(self.place + chr(10))
class Table:
    def __init__(self, columns, data):
        pass
def finish():
    {finish}
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Installs a package `trackio` in which each of the given functions also does something; gives the file that it logs to."""

    def install(**does: str) -> Path:
        folder = tmp_path / "packages"
        folder.mkdir(exist_ok=True)
        (folder / "trackio.py").write_text(STAND_IN.format(**{"init": "pass", "log": "pass", "finish": "pass"} | does))
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
        monkeypatch.setenv("LOGGED", str(tmp_path / "logged"))
        return tmp_path / "logged"

    return install


@pytest.mark.slow
def test_a_run_is_followed_while_it_is_written(tmp_path, stand_in, capfd):
    logged = stand_in()
    with (
        tracked(["trackio", "", "trackio"], project="p") as trackers,
        RunDir.create(tmp_path / "runs", "grpo", name="r", metadata={}) as run,
    ):
        trackers.start(run)
        write_steps(run, range(3))
        deadline = time.monotonic() + 60
        while not (logged.exists() and len(logged.read_text().splitlines()) >= 4):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert len(logged.read_text().splitlines()) == 4  # all but the last step
        write_steps(run, [3])
    lines = [json.loads(line) for line in logged.read_text().splitlines()]
    sent = [("eval" if "eval_step" in values else "train", step) for step, values in lines]
    assert sent == [("eval", 0), ("train", 0), ("train", 1), ("eval", 2), ("train", 2), ("train", 3)]
    assert capfd.readouterr().err == "trackio: look at it with: trackio show --project p\n"


def test_trackers_end_when_the_status_is_written_and_before_others_may_write_the_run(tmp_path, capfd):
    with tracked(["csv"], project="") as trackers:
        with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata={}) as run:
            trackers.start(run)
            write_steps(run, range(3))
        assert (run.path / "csv" / "train.csv").read_text().count("\n") == 4, (
            "the last step too, which is sent once the run has ended"
        )
        assert read_run(run.path).metadata["status"] == "finished"


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (
            {"init": 'raise ValueError("no key")'},
            "trackio: ValueError: no key (the run goes on without it; later: rlvr export",
        ),
        slow({"log": 'raise OSError("the net is down")'}, "trackio: OSError: the net is down (the run"),
        slow({"log": "os.abort()"}, "note: the process of trackio ended with status -6"),
        slow({"init": "time.sleep(1000)"}, "note: trackio has not got everything within 1 s; the rest: rlvr export"),
        ({"finish": "time.sleep(1000)"}, "note: trackio has not got everything within 1 s; the rest: rlvr export"),
    ],
)
def test_a_tracker_that_fails_or_hangs_neither_ends_nor_holds_up_a_run(tmp_path, stand_in, capfd, does, says):
    logged = stand_in(**does)
    trackers = Children(["trackio"], project="p", seconds=1.0 if "sleep" in str(does) else 60.0)
    with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata={}) as run:
        trackers.start(run)
        write_steps(run, range(3))
    said = capfd.readouterr().err
    assert said.count(says) == 1
    assert f"rlvr export {run.path} --to trackio --track-project p" in said
    assert read_run(run.path).metadata["status"] == "finished"
    assert "finish" in does or not logged.exists()


def sent_to(logged: Path) -> readers.Points:
    """What the stand-in got."""
    points: readers.Points = {}
    for _, values in map(json.loads, logged.read_text().splitlines()):
        axis = "train" if "train_step" in values else "eval"
        for name, value in values.items():
            if name.startswith(f"{axis}/") and name != "eval/samples":
                points.setdefault((name, int(values[f"{axis}_step"])), []).append(float(value))
    return points


def test_a_training_run_is_tracked_and_a_resumed_one_goes_on(tmp_path, stand_in, monkeypatch, capfd):
    """From the command line: --track is stored in the run, and no point is sent twice."""
    logged = stand_in()
    monkeypatch.chdir(tmp_path)
    invoke(
        "grpo --dataset arithmetic:64 --n-grpo-steps 1 --rollout-batch-size 4 --group-size 4 --train-batch-size 4 "
        "--gradient-accumulation-steps 1 --sampling-max-tokens 4 --eval-examples 1 --run r --track trackio "
        "--track-project ablations".split()
    )
    run = tmp_path / "runs" / "r"
    assert "trackio show --project ablations" in capfd.readouterr().err
    assert numbers(sent_to(logged)) == {
        key: value for key, value in truth(run).items() if key[0] != CHECKPOINT or key[1] < 1
    }
    assert read_run(run).metadata["config"]["track"] == ["trackio"]
    invoke("grpo --resume r --n-grpo-steps 2".split())
    assert numbers(sent_to(logged)) == {
        key: value for key, value in truth(run).items() if key[0] != CHECKPOINT or key[1] < 2
    }
    logged.unlink()
    invoke(["grpo", "--resume", "r", "--n-grpo-steps", "3", "--track", ""])
    assert not logged.exists()


def test_eval_is_tracked(tmp_path, stand_in, monkeypatch, capfd):
    logged = stand_in()
    monkeypatch.chdir(tmp_path)
    invoke("eval --limit 1 --sampling-max-tokens 4 --run e --track trackio --track-project p".split())
    assert numbers(sent_to(logged)) == truth(tmp_path / "runs" / "e")
    assert "trackio show --project p" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_a_real_tracker_of_a_killed_and_resumed_run(tmp_path, forks, name):
    """Killed with its trackers at work, resumed, and read back by the tracker's own reader."""
    environment = {name: os.environ[name] for name in ("PYTHONPATH", "WANDB_MODE", "TRACKIO_DIR")}
    command = (
        "grpo --dataset arithmetic:64 --n-grpo-steps 8 --rollout-batch-size 16 --group-size 4 --train-batch-size 16 "
        f"--gradient-accumulation-steps 2 --sampling-max-tokens 16 --eval-examples 4 --eval-every 2 --checkpoint-every 3 --run r --track {name}"
    ).split()
    forks.run(*command, cwd=tmp_path, environment=environment, fault="update:6", status=-signal.SIGKILL)
    forks.run("grpo", "--resume", "r", cwd=tmp_path, environment=environment, status=0)
    run = tmp_path / "runs" / "r"
    found = numbers(read_back(name, run))
    now = {key: value for key, value in truth(run).items() if key[0] != CHECKPOINT or key[1] < 8}
    assert found.keys() == now.keys()
    differing = {key[0] for key, value in now.items() if not same(found[key], value, name=name)}
    assert all("seconds" in tag for tag in differing)
    assert name != "tensorboard" or not differing
