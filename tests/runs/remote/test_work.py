"""What is here of runs that are in object storage: it has a bound, sweeps work in it, and models come from the store."""

import json
import os
import shlex
import shutil
import subprocess
import time

import pytest
from safetensors.torch import load_file

from rlvr_cli.cli import invoke
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.models.identity import model_facts, model_path
from rlvr_cli.replay.run import replay_run
from rlvr_cli.replay.stored import read_stored
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.lock import Lock, holder_of
from rlvr_cli.runs.readers import read_metadata, read_rollouts, resolve_run
from rlvr_cli.runs.remote import views, work
from rlvr_cli.runs.remote.copies import export_run, fetch_run
from rlvr_cli.runs.remote.lease import Lease
from rlvr_cli.runs.remote.store import Store
from rlvr_cli.runs.run_dir import RunDir
from s3 import Fault, needs_packages
from stores import a_rollout, as_killed
from teachers import write_teacher

pytestmark = needs_packages
ARMS = 'command = "eval"\nseeds = [0]\n[grid]\nsampling_temperature = [0.5, 1.0]\n[options]\ndataset = "arithmetic:4"\n'


def until(condition) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def write_run(place, name: str) -> None:
    with RunDir.create(str(place), "grpo", name=name, metadata={}) as run:
        run.commit_rollouts("train", 1, [a_rollout(run.id, i, step=1) for i in range(3)])


def test_runs_that_are_wholly_uploaded_leave_this_machine_when_they_exceed_the_bound(s3, place, monkeypatch):
    here = work.work_folder(str(place))
    for name in ("old", "used", "older"):
        write_run(place, name)
    (here / "own").mkdir()
    (here / "own/notes.txt").write_text("no run, and not uploaded")
    assert sorted(os.listdir(here)) == [
        ".old.uploaded",
        ".older.uploaded",
        ".used.uploaded",
        "old",
        "older",
        "own",
        "used",
    ]
    for name, hours in (("older", 4), ("used", 3), ("old", 2)):
        os.utime(here / f".{name}.uploaded", (time.time() - hours * 3600,) * 2)
    lock = Lock(here / "used")  # some process has it
    monkeypatch.setenv("RLVR_CACHE_GB", str(2.5 * work._bytes_of(here / "old") / 1e9))
    write_run(place, "new")
    lock.release()
    assert sorted(path.name for path in here.iterdir() if path.name[0] != ".") == ["new", "own", "used"]
    views.forget()
    assert check_run(resolve_run("older", str(place))).problems == []
    monkeypatch.setenv("RLVR_CACHE_GB", "0.000001")
    write_run(place, "newest")
    assert sorted(path.name for path in here.iterdir() if path.name[0] != ".") == ["new", "newest", "own"]


def test_a_run_that_goes_on_is_not_taken_for_one_that_was_uploaded(s3, place):
    write_run(place, "r")
    mark = work.work_folder(str(place)) / ".r.uploaded"
    assert mark.exists()
    with RunDir.resume(resolve_run("r", str(place))) as run:
        assert not mark.exists()
        run.commit_rollouts("train", 2, [a_rollout(run.id, 0, step=2)])
    assert mark.exists()


def test_a_name_whose_run_was_removed_from_the_store_is_refused_with_the_reason(s3, place):
    write_run(place, "r")
    here = work.work_folder(str(place)) / "r"
    there = Store(place.below("r"))
    there.delete(list(there.sizes()))
    views.forget()
    lock = Lock(here)
    for was in ("was not uploaded", "is no longer in the store"):
        with pytest.raises(RlvrError, match=rf"{here} exists: .* {was}") as raised:
            write_run(place, "r")
        assert f"rlvr export {here} --to {place}" in raised.value.hint
        assert (f"Remove {here} to make a new run" in raised.value.hint) == (was != "was not uploaded")
        lock.release()  # with which it may have gone on
    shutil.rmtree(here)
    write_run(place, "r")


def test_a_model_is_that_of_a_run_in_the_store(s3, place, tiny_model_dir, tmp_path, monkeypatch):
    trained = tmp_path / "trained"
    with RunDir.create(tmp_path, "sft", name="trained", metadata={}) as run:
        run.finish("finished")
    shutil.copytree(tiny_model_dir, trained / "model")
    export_run(trained, place)
    words = ["--dataset", "arithmetic:4", "--sampling-max-tokens", "4", "--runs-dir", str(tmp_path / "runs")]
    address = f"{place}/trained/model"
    invoke(["eval", "--model", str(trained / "model"), "--run", "a", *words])
    s3.requests.clear()
    invoke(["eval", "--model", address, "--run", "b", *words])
    assert len([r for r in s3.requests if "model.safetensors" in r.replace(".", "", 1) or "/model/model." in r]) == 1
    a, b = (read_rollouts(tmp_path / "runs" / name).drop_columns(["run_id", "sampled_at"]) for name in "ab")
    assert a.equals(b)
    facts = json.loads((tmp_path / "runs/b/run.json").read_text())["facts"]["model"]
    assert (facts["name"], facts["path"]) == (address, address)
    monkeypatch.setenv("RLVR_CACHE_DIR", str(tmp_path / "elsewhere"))
    views.forget()
    assert model_facts(address) == facts
    assert model_path(address).startswith(str(tmp_path / "elsewhere"))


def test_a_teacher_is_that_of_a_run_in_the_store(s3, place, tiny_model_dir, tmp_path, monkeypatch):
    """The student learns the same from it as from its directory, and the run can be replayed on another machine."""
    with RunDir.create(tmp_path, "sft", name="trained", metadata={}) as run:
        run.finish("finished")
    here = write_teacher(tmp_path / "trained/model", of=tiny_model_dir)
    export_run(tmp_path / "trained", place)
    words = [
        "--model",
        str(tiny_model_dir),
        "--dataset",
        "arithmetic:4",
        "--eval-dataset",
        "arithmetic:2",
        "--grader-workers",
        "1",
    ]
    words += ["--sampling-max-tokens", "4", "--n-distill-steps", "1", "--rollout-batch-size", "4", "--group-size", "2"]
    there = f"{place}/trained/model"
    for name, teacher in (("a", str(here)), ("b", there)):
        invoke(["distill", "--teacher", teacher, "--run", name, *words, "--runs-dir", str(tmp_path / "runs")])
    weights = [load_file(tmp_path / "runs" / name / "model/model.safetensors") for name in "ab"]
    assert all(tensor.equal(weights[1][name]) for name, tensor in weights[0].items())
    facts = json.loads((tmp_path / "runs/b/run.json").read_text())["facts"]["teacher"]
    assert (facts["name"], facts["path"]) == (there, there)
    monkeypatch.setenv("RLVR_CACHE_DIR", str(tmp_path / "elsewhere"))
    views.forget()
    found = replay_run(read_stored(tmp_path / "runs/b"), most=None)
    assert not found.problems


def sweep_of_arms(folder, place, model) -> list[str]:
    """The words of a sweep whose runs are in the store. Its file is in the folder."""
    (folder / "arms.toml").write_text(ARMS)
    words = ["sweep", str(folder / "arms.toml"), "--model", str(model), "--sampling-max-tokens", "4"]
    return [*words, "--runs-dir", str(place), "--format", "json"]


def on_another_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("RLVR_CACHE_DIR", str(tmp_path / "elsewhere"))
    views.forget()


def test_only_runs_that_have_ended_are_brought_and_a_copy_that_has_fallen_behind_is_replaced(
    s3, place, tmp_path, monkeypatch, capsys
):
    write_run(place, "done")
    with RunDir.create(str(place), "grpo", name="r", metadata={}) as run:
        run.commit_rollouts("train", 1, [a_rollout(run.id, i, step=1) for i in range(3)])
        until(lambda: Store(place.below("r")).read("index.json") is not None)
        on_another_machine(tmp_path, monkeypatch)
        mirror = work.Mirror(str(place))
        found = mirror.bring(["done", "r", "none"], left_out={})
        assert list(found) == ["r"]
        assert holder_of(found["r"])["pid"] == os.getpid()
        assert sorted(path.name for path in mirror.folder.iterdir()) == ["done"]
        fetch_run(place.below("r"), mirror.folder)  # as an earlier version did
        assert read_metadata(mirror.folder / "r")["status"] == "running"
        assert list(mirror.bring(["r"], left_out={})) == ["r"]
    capsys.readouterr()
    assert mirror.bring(["done", "r"], left_out={}) == {}
    assert capsys.readouterr().err.count("fetched  s3://") == 1
    assert read_metadata(mirror.folder / "r")["status"] == "finished"
    with RunDir.resume(mirror.folder / "r") as run:  # made longer here
        run.commit_rollouts("train", 2, [a_rollout(run.id, 0, step=2)])
    assert mirror.bring(["r"], left_out={}) == {}
    assert read_rollouts(mirror.folder / "r").num_rows == 4, "what is further here stays"


def test_a_quickstart_goes_by_the_runs_in_the_store(s3, place, tmp_path):
    with RunDir.create(tmp_path, "tiny", name="q-start", metadata={}) as run:
        run.finish("finished")
    export_run(tmp_path / "q-start", place)
    with pytest.raises(Interrupted), RunDir.create(tmp_path, "eval", name="p-start-eval", metadata={}):
        raise Interrupted("")
    export_run(tmp_path / "p-start-eval", place)
    with pytest.raises(RlvrError, match=rf"p-start-eval has not ended in {place}, and is not here\."):
        invoke(["quickstart", "--name", "p", "--runs-dir", str(place)])
    with pytest.raises(RlvrError, match="/q-start exists already, and was made by another command"):
        invoke(["quickstart", "--name", "q", "--runs-dir", str(place)])


@pytest.mark.parametrize("scheme", ["gs", "az", "abfs"])
def test_stores_of_another_kind_are_refused_and_no_directory_is_made(tmp_path, monkeypatch, scheme):
    monkeypatch.chdir(tmp_path)
    for words in (["runs"], ["eval", "--dataset", "arithmetic:2"], ["sweep", "grpo_baselines"], ["quickstart"]):
        with pytest.raises(RlvrError, match="is in a store of another kind"):
            invoke([*words, "--runs-dir", f"{scheme}://bucket/runs"])
    for words in (["eval", "--dataset", "arithmetic:2", "--model"], ["distill", "--teacher"]):
        with pytest.raises(RlvrError, match="is in a store of another kind"):
            invoke([*words, f"{scheme}://bucket/runs/r/model"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("said", "rest", "more"),
    [
        ("There is no ", "", ""),
        ("", "/trained", " is a run, not a folder of one"),
        ("There is no ", "/trained/model", ""),
        ("There is no ", "/nowhere/model", ""),
    ],
)
def test_a_model_that_is_not_in_the_store_is_named(s3, place, tmp_path, said, rest, more):
    with RunDir.create(tmp_path, "sft", name="trained", metadata={}) as run:
        run.finish("finished")
    export_run(tmp_path / "trained", place)
    with pytest.raises(RlvrError, match=f"{said}{place}{rest}{more}"):
        invoke(["eval", "--model", f"{place}{rest}", "--dataset", "arithmetic:4", "--runs-dir", str(tmp_path / "runs")])


@pytest.mark.slow
def test_a_sweep_is_in_the_store_run_by_run_and_another_machine_has_nothing_to_repeat(
    s3, place, forked, tmp_path, monkeypatch, capsys, tiny_model_dir
):
    monkeypatch.chdir(tmp_path)
    words = sweep_of_arms(tmp_path, place, tiny_model_dir)
    s3.faults += [Fault("PUT", "sampling_temperature-1-s0", "403")]
    invoke(words)
    first = capsys.readouterr()
    assert "note: arms/sampling_temperature-1-s0 is uploaded later" in first.err
    assert {"report.html", "sweep.json"} <= Store(place.below("arms")).sizes().keys()
    views.forget()
    names = {run.name for run in views.views_below(f"{place}/arms")}
    assert names == {"sampling_temperature-0.5-s0", "sampling_temperature-1-s0"}
    monkeypatch.setenv("RLVR_CACHE_DIR", str(tmp_path / "elsewhere"))
    views.forget()
    invoke(words)
    again = capsys.readouterr()
    assert again.err.count("finished before") == again.err.count("fetched  s3://") == 2
    assert again.out == first.out


def test_the_emitted_commands_of_a_sweep_write_their_runs_into_the_store(
    s3, place, tmp_path, monkeypatch, capsys, tiny_model_dir
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLVR_RUNS_DIR", str(place))
    (tmp_path / "arms.toml").write_text(ARMS)
    words = ["sweep", "arms.toml", "--model", str(tiny_model_dir), "--sampling-max-tokens", "4", "--emit"]
    invoke([*words, "commands"])
    commands = capsys.readouterr().out.splitlines()
    assert [shlex.split(line)[-2:] for line in commands] == [["--runs-dir", f"{place}/arms"]] * 2
    invoke([*words, "slurm"])
    script = capsys.readouterr().out
    assert str(work.work_root()) not in script
    (tmp_path / "srun").write_text('#!/bin/bash\necho "${@:2}"\n')
    (tmp_path / "rlvr").write_text('#!/bin/bash\necho "$@" > asked; test -e begun\n')
    for name in ("srun", "rlvr"):
        (tmp_path / name).chmod(0o755)

    def job() -> str:
        variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "0"}
        return subprocess.run(["bash", "-c", script], env=variables, check=True, capture_output=True, text=True).stdout

    name = "sampling_temperature-0.5-s0"
    assert job().split() == shlex.split(commands[0])[1:]
    question = (tmp_path / "asked").read_text().split()
    with pytest.raises(RlvrError, match="There is no run at"):
        invoke(question)
    invoke(shlex.split(commands[0])[1:])
    assert "index.json" in Store(place.below("arms").below(name)).sizes()
    invoke(question)
    (tmp_path / "begun").touch()
    assert job() == f"eval --resume {name} --runs-dir {place}/arms\n"


def test_a_sweep_leaves_alone_what_another_machine_writes_and_goes_on_with_what_it_left(
    s3, place, forked, tmp_path, monkeypatch, capsys, tiny_model_dir
):
    monkeypatch.chdir(tmp_path)
    words = sweep_of_arms(tmp_path, place, tiny_model_dir)

    def statuses() -> list[str]:
        views.forget()
        capsys.readouterr()
        invoke([*words, "--dry-run"])
        return [row["status"] for row in json.loads(capsys.readouterr().out)]

    invoke([*words, "--emit", "commands"])
    for line in capsys.readouterr().out.splitlines():
        invoke(shlex.split(line)[1:])
    left = place.below("arms").below("sampling_temperature-0.5-s0")
    here = work.work_folder(f"{place}/arms") / left.prefix.rpartition("/")[2]
    as_killed(here)
    export_run(here, place.below("arms"))
    lease = Lease.acquire(Store(left))
    on_another_machine(tmp_path, monkeypatch)
    assert statuses() == ["running", "finished"]
    with pytest.raises(RlvrError, match=r"1 of the 2 runs failed: sampling_temperature-0\.5-s0"):
        invoke(words)
    assert "another process writes it; it is left alone" in capsys.readouterr().err
    lease.release()
    assert statuses() == ["begun", "finished"]
    invoke(words)
    assert "sampling_temperature-0.5-s0: goes on" in capsys.readouterr().err
    log = (work.work_folder(f"{place}/arms") / "logs" / f"{here.name}.log").read_text()
    assert f"upload   {left}" in log, "it takes the lease, so that nobody else writes it"
    views.forget()
    assert read_metadata(resolve_run(here.name, f"{place}/arms"))["status"] == "finished"
    assert statuses() == ["finished", "finished"]


def test_a_bad_copy_in_the_store_is_left_out_of_a_sweep_and_the_others_go_on(
    s3, place, forked, tmp_path, monkeypatch, capsys, tiny_model_dir
):
    monkeypatch.chdir(tmp_path)
    words = sweep_of_arms(tmp_path, place, tiny_model_dir)
    invoke([*words, "--emit", "commands"])
    invoke(shlex.split(capsys.readouterr().out.splitlines()[0])[1:])
    bad = "sampling_temperature-0.5-s0"
    Store(place.below("arms").below(bad)).put_file("index.json", b"{", size=1)
    on_another_machine(tmp_path, monkeypatch)
    capsys.readouterr()
    invoke([*words, "--dry-run"])
    shown = capsys.readouterr()
    assert [row["status"] for row in json.loads(shown.out)] == ["left out", "new"]
    assert f"{bad} is left out: {place}/arms/{bad}/index.json is not the index of a run." in shown.err
    with pytest.raises(RlvrError, match=f"1 of the 2 runs failed: {bad}"):
        invoke(words)
    shown = capsys.readouterr()
    assert "is not the index of a run" in shown.err
    assert [row["arm"] for row in json.loads(shown.out)["arms"]] == ["sampling_temperature-1"]


def test_a_sweep_elsewhere_with_other_options_has_none_of_the_runs_in_the_store(
    s3, place, tmp_path, monkeypatch, capsys, tiny_model_dir
):
    monkeypatch.chdir(tmp_path)
    words = sweep_of_arms(tmp_path, place, tiny_model_dir)
    invoke([*words, "--emit", "commands"])
    invoke(shlex.split(capsys.readouterr().out.splitlines()[0])[1:])
    on_another_machine(tmp_path, monkeypatch)
    with pytest.raises(RlvrError, match="--sampling-max-tokens was 4, and is now 5"):
        invoke([*words, "--sampling-max-tokens", "5", "--dry-run"])


@pytest.mark.full
def test_the_quickstart_is_in_the_store(s3, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    invoke(["quickstart", "--name", "q", "--runs-dir", str(place)])
    assert capsys.readouterr().err.count(f"uploaded to {place}/q-") == 6
    views.forget()
    assert len(views.views_below(str(place))) == 6
