"""`rlvr runs`: what the list says of runs that have ended, are being written, were killed or are damaged."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager
from datetime import datetime, timedelta

import pytest

from factories import a_rollout, a_segment
from rlvr_cli.analysis.live import pages
from rlvr_cli.analysis.queries import database, run_list
from rlvr_cli.analysis.queries.run_list import COLUMNS, list_runs
from rlvr_cli.analysis.summary import summarize
from rlvr_cli.cli import invoke
from rlvr_cli.commands.store import runs as command
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.config.store.runs import RunsConfig
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.runs.lock import LOCK
from rlvr_cli.runs.run_dir import RunDir


def make(root, name, rewards=(1.0, 0.0), *, command="grpo", samples=1, **metadata):
    """A finished run with an evaluation at step 4 of these rewards, `samples` of each question."""
    with RunDir.create(root, command, name=name, metadata=metadata) as run:
        rows = [
            a_rollout(run_id=name, step=4, example_id=f"q{i // samples}", sample_index=i % samples, reward=reward)
            for i, reward in enumerate(rewards)
        ]
        run.commit_rollouts("eval", 0, [a_rollout(run_id=name, reward=0.0)])
        run.commit_rollouts("eval", 4, rows)
    return root / name


def listed(root, **flags):
    """The rows of the list, by run."""
    rows = list_runs([root / name for name in sorted(os.listdir(root))], **flags)
    assert all(row.keys() == COLUMNS.keys() for row in rows)
    return {row["run_id"]: row for row in rows}


@pytest.fixture
def run_command(tmp_path, capsys):
    """Calls `rlvr runs` on tmp_path; gives stdout and stderr."""

    def call(**flags):
        command.run(resolve(RunsConfig, flags={"runs_dir": str(tmp_path), **flags}, command="runs"))
        return capsys.readouterr()

    return call


@pytest.mark.parametrize("samples", [1, 4])
def test_the_accuracy_of_the_last_evaluation_is_the_summarys(tmp_path, samples):
    path = make(tmp_path, "r", (1.0, 0.0, 1.0, 1.0, 0.5, 0.0, 0.0, 1.0), samples=samples)
    accuracy = summarize(path).accuracy
    row = listed(tmp_path)["r"]
    assert (row["phase"], row["step"], row["questions"]) == ("eval", 4, 8 // samples)
    assert (row["accuracy"], row["low"], row["high"]) == (accuracy.value, accuracy.low, accuracy.high)
    assert accuracy.value == 0.5


def test_a_comparison_of_two_runs_has_wins_and_no_accuracy(tmp_path, run_command):
    make(tmp_path, "pairs", (1.0, 1.0, 0.5, 0.5, 0.0), command="pairwise")
    make(tmp_path, "r", (1.0, 0.0, 0.0, 0.0, 0.0))
    row = listed(tmp_path)["pairs"]
    assert (row["accuracy"], row["low"], row["high"], row["problem"]) == (None, None, None, None)
    assert [line.split()[0] for line in run_command(sort="best").out.splitlines()[2:]] == ["r", "pairs"]


def test_a_run_without_evaluations_shows_its_last_training_batch(tmp_path, run_command):
    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        for step, reward in ((0, 0.0), (1, 1.0)):
            run.commit_rollouts("train", step, [a_rollout(run_id="r", phase="train", step=step, reward=reward)])
    row = listed(tmp_path)["r"]
    assert (row["phase"], row["step"], row["accuracy"]) == ("train", 1, 1.0)
    assert "(training)" in run_command().out


def test_status(tmp_path):
    """A run whose process is dead is not running, and neither is one whose process number another has by now."""
    make(tmp_path, "finished")
    with pytest.raises(Interrupted), RunDir.create(tmp_path, "grpo", name="stopped", metadata={}):
        raise Interrupted
    with pytest.raises(ValueError, match="x"), RunDir.create(tmp_path, "grpo", name="failed", metadata={}):
        raise ValueError("x")
    script = (
        "import os, sys; from rlvr_cli.runs.run_dir import RunDir\n"
        "run = RunDir.create(sys.argv[1], 'grpo', name='killed', metadata={}); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    with RunDir.create(tmp_path, "grpo", name="running", metadata={}):
        statuses = {name: row["status"] for name, row in listed(tmp_path).items()}
        lock = tmp_path / "killed" / LOCK
        holder = json.loads(lock.read_text())
        began = datetime.fromisoformat(holder["since"]) - timedelta(days=1)
        lock.write_text(json.dumps({**holder, "pid": os.getpid(), "since": began.isoformat()}))
        assert listed(tmp_path)["killed"]["status"] == "killed"
    assert statuses == {
        "finished": "finished",
        "stopped": "interrupted",
        "failed": "failed",
        "killed": "killed",
        "running": "running",
    }


def test_progress(tmp_path, run_command):
    with RunDir.create(tmp_path, "grpo", name="half", metadata={"planned": {"updates": 4}}) as run:
        for step in range(2):
            run.commit_metrics(step, "train", {"update/skipped": 0.0, "loss/value": 1.0})
        run.commit_metrics(2, "train", {"checkpoint/seconds": 1.0})  # after the second update
        half = listed(tmp_path)["half"]
    make(tmp_path, "ended", planned={"updates": 40}, updates=40)
    make(tmp_path, "measured", command="eval", planned={"samples": 8})
    make(tmp_path, "rounds", command="ei", planned={"steps": 5})
    planned = {"steps": 3, "updates": 6}
    with RunDir.create(tmp_path, "grpo", name="parts", metadata={"planned": planned}) as run:
        run.commit_segments(0, [a_segment(run_id="parts")])  # no group has ended
        run.commit_segments(1, [a_segment(run_id="parts", step=1)])
        run.commit_rollouts("train", 1, [a_rollout(run_id="parts", phase="train", step=1)])
        run.update(updates=3)  # of the two steps
    make(tmp_path, "older", command="eval")  # of a version that did not record it
    rows = listed(tmp_path)
    found = {name: (row["done"], row["planned"], row["unit"]) for name, row in rows.items()}
    assert (half["done"], half["planned"], half["unit"]) == (2, 4, "updates")
    assert found["ended"] == (40, 40, "updates")
    assert found["measured"] == (3, 8, "samples")
    assert found["rounds"] == (0, 5, "steps")
    assert found["parts"] == (2, 3, "steps")
    assert found["older"] == (3, None, "samples")
    table = run_command(sort="name").out
    assert "finished 40/40 " in table
    assert "finished 3 " in table


def test_what_differs_is_named_among_runs_of_one_command(tmp_path):
    options = {"learning_rate": 1e-5, "seed": 0, "runs_dir": "runs", "use_std_normalization": True}
    make(tmp_path, "a", config=options | {"run": "a"})
    make(tmp_path, "b", config=options | {"run": "b", "learning_rate": 3e-5, "runs_dir": "elsewhere"})
    make(tmp_path, "c", config={**options, "run": "c", "use_std_normalization": False})
    make(tmp_path, "d", command="eval", config={"seed": 7})
    differs = {name: row["differs"] for name, row in listed(tmp_path).items()}
    assert differs == {
        "a": "",  # what most runs have is not named
        "b": "learning_rate 3e-05",
        "c": "no use_std_normalization",
        "d": "",
    }
    both = {name: row["differs"] for name, row in zip("ab", list_runs([tmp_path / "a", tmp_path / "b"]), strict=True)}
    assert both == {"a": "learning_rate 1e-05", "b": "learning_rate 3e-05"}


def test_what_a_resumed_run_may_change_is_named_if_it_tells_runs_apart(tmp_path):
    for name, epochs in (("a", 1), ("b", 2), ("c", 3)):
        make(tmp_path, name, command="sft", config={"sft_epochs": epochs, "engine": "vllm" if epochs == 3 else "auto"})
    differs = {name: row["differs"] for name, row in listed(tmp_path).items()}
    assert differs == {"a": "sft_epochs 1", "b": "sft_epochs 2", "c": "engine vllm, sft_epochs 3"}


@pytest.mark.slow
def test_the_rarest_values_come_first_and_no_two_runs_look_alike(tmp_path, run_command, monkeypatch):
    usual = {"dataset": "arithmetic:128", "sampling_max_tokens": 160}
    named = {f"b-{n}": {**usual, "thinking_budget": str(n)} for n in (8, 40)}
    named |= {f"e-{n}": {"dataset": "countdown", "model": f"m{n}" * (200 if n == 2 else 1)} for n in range(3)}
    for name, config in named.items():
        make(tmp_path, name, command="eval", config=config)
    differs = {name: row["differs"] for name, row in listed(tmp_path).items()}
    assert differs["b-8"] == "thinking_budget 8, dataset arithmetic:128, model default, sampling_max_tokens 160"
    assert differs["e-0"] == "model m0"  # most runs are of countdown
    table = run_command().out
    assert differs["b-40"] in table  # nobody looks at a pipe
    assert differs["e-2"] in table
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(command, "MOST_SHOWN", 30)
    monkeypatch.setenv("COLUMNS", "400")
    table = run_command().out
    assert re.search("thinking_budget 40, dataset … *\n", table)
    assert differs["b-40"] not in table
    assert "sampling_max_tokens" in run_command(format="markdown").out


def test_what_differs_is_cut_only_so_far_that_it_still_differs():
    texts = ["a one, b two, c three", "a one, b two, c four", "a one, b two, c four", "d five, e six", "", "x" * 99]
    assert run_list.cut_differences(texts, most=9) == [
        "a one, b two, c three", "a one, b two, c four", "a one, b two, c four", "d five, e …", "", "x" * 99
    ]  # fmt: skip
    assert run_list.cut_differences(["a one, b two", "a one"], most=3) == ["a one, …", "a one"]
    assert run_list.cut_differences([], most=9) == []


def test_damaged_runs_are_listed_as_broken(tmp_path, run_command):
    whole, torn, parted, without = (make(tmp_path, name) for name in ("whole", "torn", "parted", "without"))
    (torn / "run.json").write_text("{")
    part = next((parted / "rollouts").glob("eval-000004*"))
    data = bytearray(part.read_bytes())
    data[40] ^= 1
    part.write_bytes(data)
    (without / "run.json").unlink()
    (tmp_path / "notes.txt").write_text("no run")
    said = run_command(format="json")
    rows = {row["run_id"]: row for row in json.loads(said.out)}
    assert {name: row["status"] for name, row in rows.items()} == {
        "whole": "finished",
        "torn": "broken",
        "parted": "broken",
        "without": "broken",
    }
    assert rows["whole"]["accuracy"] == 0.5
    assert "run.json is damaged" in rows["torn"]["problem"]
    assert said.err.count("broken: ") == 3
    assert whole.name not in said.err


def test_a_run_that_is_deleted_meanwhile_does_not_hide_the_others(tmp_path, monkeypatch):
    make(tmp_path, "a")
    make(tmp_path, "b")
    check = run_list.check_sums

    def checked(run, sums):
        check(run, sums)
        if run.name == "a":
            shutil.rmtree(run)

    monkeypatch.setattr(run_list, "check_sums", checked)
    rows = listed(tmp_path)
    assert {name: (row["status"], row["accuracy"]) for name, row in rows.items()} == {
        "a": ("broken", None),
        "b": ("finished", 0.5),
    }
    assert "No such file" in rows["a"]["problem"]


@contextmanager
def open_with_no_memory(infos):
    with pytest.MonkeyPatch.context() as limits:
        limits.setattr(database, "MEMORY_LIMIT", "1KB")
        with database.open_runs(infos) as opened:
            yield opened


def test_a_run_whose_accuracy_cannot_be_counted_is_sound(tmp_path, monkeypatch, run_command):
    make(tmp_path, "a")
    damaged = make(tmp_path, "b")
    (damaged / "run.json").write_text("{")
    monkeypatch.setattr(run_list, "open_runs", open_with_no_memory)
    said = run_command(format="json")
    rows = {row["run_id"]: row for row in json.loads(said.out)}
    assert (rows["a"]["status"], rows["a"]["command"], rows["a"]["accuracy"]) == ("finished", "grpo", None)
    assert "a: its accuracy is not known: The query needed more than 1KB of memory." in said.err
    assert said.err.count("broken: ") == 1
    page = pages.runs_page(
        pages.run_rows({"a": tmp_path / "a"}),
        {"a": ""},
        title="t",
        given="",
        order="",
        state="",
        below="",
        committed="",
    )
    assert "its accuracy is not known: The query needed" in page
    assert ">finished<" in page


def test_what_the_list_does_not_show_is_not_read(tmp_path):
    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        run.commit_segments(0, [a_segment(run_id="r")])
        run.commit_rollouts("eval", 0, [a_rollout(run_id="r", reward=1.0)])
    part = next((tmp_path / "r" / "segments").iterdir())
    part.write_bytes(bytes(part.stat().st_size))
    make(tmp_path, "other")
    assert {name: row["accuracy"] for name, row in listed(tmp_path).items()} == {"r": 1.0, "other": 0.5}


def test_where_and_sort(tmp_path, run_command):
    for name, rewards in (("low", (0.0, 0.0)), ("high", (1.0, 1.0)), ("middle", (1.0, 0.0))):
        make(tmp_path, name, rewards, config={"learning_rate": 1e-5 if name == "low" else 1e-4})

    def names(**flags):
        return [row["run_id"] for row in json.loads(run_command(format="json", **flags).out)]

    assert names() == ["middle", "high", "low"]
    assert names(sort="best") == ["high", "middle", "low"]
    assert names(sort="worst") == ["low", "middle", "high"]
    assert names(where="accuracy > 0.4", sort="name") == ["high", "middle"]
    assert names(where="(config->>'$.learning_rate')::DOUBLE < 5e-5") == ["low"]
    said = run_command(format="json", limit=1, sort="best")
    assert [row["run_id"] for row in json.loads(said.out)] == ["high"]
    assert "only the first 1 of 3 runs" in said.err
    assert "no run fits" in run_command(where="status = 'failed'").err
    with pytest.raises(RlvrError, match="reward"):
        run_command(where="reward > 1")
    with pytest.raises(RlvrError, match="condition"):
        run_command(where="true); DROP TABLE runs; --")


def test_size(tmp_path, run_command):
    path = make(tmp_path, "r")
    (path / "model").mkdir()
    (path / "model" / "weights").write_bytes(bytes(3_000_000))
    held = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert json.loads(run_command(size=True, format="json").out)[0]["bytes"] == held
    assert json.loads(run_command(format="json").out)[0]["bytes"] is None
    assert re.search(r" 3\.0\d MB ", run_command(size=True).out)


def test_formats(tmp_path, run_command):
    make(tmp_path, "r")
    assert run_command(format="csv").out.splitlines()[0].split(",") == list(COLUMNS)
    assert run_command(format="markdown").out.startswith("| run | command | status | accuracy | age | differs |")
    assert "0.500 [0.095, 0.905]" in run_command().out


def test_patterns_and_runs_of_one_name(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, name in (("runs", "abl-1"), ("runs", "abl-2"), ("runs", "other"), ("old", "abl-1")):
        make(tmp_path / folder, name, (1.0, 1.0) if folder == "old" else (0.0, 0.0))

    def names(*arguments):
        invoke(["runs", *arguments, "--format", "json"])
        return sorted((row["run_id"], row["accuracy"]) for row in json.loads(capsys.readouterr().out))

    assert names("abl-*") == names("runs/abl-*") == [("abl-1", 0.0), ("abl-2", 0.0)]
    assert names("runs/abl-1", "old/*") == [("old/abl-1", 1.0), ("runs/abl-1", 0.0)]
    with pytest.raises(RlvrError, match=r"No run matches 'x\*'"):
        names("x*")


def test_no_directory_of_runs_is_an_error(tmp_path):
    with pytest.raises(RlvrError, match="There is no directory"):
        invoke(["runs", "--runs-dir", str(tmp_path / "none")])
    (tmp_path / "empty").mkdir()
    invoke(["runs", "--runs-dir", str(tmp_path / "empty")])


def test_runs_of_sweeps_alone_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for sweep in ("mine", "my own", ".hidden"):
        make(tmp_path / "runs" / sweep, "g-0.5-s0")
    make(tmp_path / "my [1]" / "mine", "g-0.5-s0")
    invoke(["runs", "--runs-dir", "my [1]"])
    said = capsys.readouterr().err
    assert said == "there is no run in my [1] itself; those of its folders: rlvr runs 'my [[]1]/mine/*'\n"
    invoke([*shlex.split(said.partition(": rlvr ")[2]), "--format", "csv"])
    assert "g-0.5-s0" in capsys.readouterr().out
    invoke(["runs"])
    said = capsys.readouterr().err
    assert said == "there is no run in runs itself; those of its folders: rlvr runs 'runs/mine/*' 'runs/my own/*'\n"
    invoke([*shlex.split(said.partition(": rlvr ")[2]), "--format", "csv"])
    assert re.findall("^[a-z ]+/g-0.5-s0", capsys.readouterr().out, re.MULTILINE) == [
        "my own/g-0.5-s0",
        "mine/g-0.5-s0",
    ]
    with pytest.raises(
        RlvrError, match=r"There is no run in runs itself.\nName runs of a folder in it: 'runs/mine/\*'"
    ):
        invoke(["analyze"])
    invoke(["analyze", "mine/g-0.5-s0"])
    assert "run runs/mine/g-0.5-s0 (finished)" in capsys.readouterr().err
    for name in ("../runs/mine/g", "./mine/g-0.5-s0", "mine/./g-0.5-s0", "mine/g"):
        with pytest.raises(RlvrError, match="There is no run"):
            invoke(["check", name])


def test_a_run_is_listed_under_the_name_of_its_directory_and_once(tmp_path, run_command):
    make(tmp_path, "a").rename(tmp_path / "moved")
    for link in ("a-link", "z-link"):
        (tmp_path / link).symlink_to("moved")
    (tmp_path / "elsewhere").symlink_to(make(tmp_path / "other", "b"))
    assert [row["run_id"] for row in json.loads(run_command(format="json", sort="name").out)] == ["elsewhere", "moved"]
