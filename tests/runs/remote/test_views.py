"""Commands that read runs in object storage: the answers of a local run, with no file fetched that they do not read, and none twice."""

import hashlib
import json
import os
import re
import shutil

import pytest

import rlvr_cli
from rlvr_cli.cli import invoke
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import builtin_model_path, model_identity, model_path
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.policy import Lora
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.readers import (
    all_runs,
    folders_of_runs,
    is_run,
    latest_run,
    read_rollouts,
    read_run,
    resolve_run,
    resolve_runs,
)
from rlvr_cli.runs.remote import cache, views
from rlvr_cli.runs.remote.copies import export_run
from rlvr_cli.runs.remote.index import INDEX, received
from rlvr_cli.runs.remote.store import Store
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.sources import source_of
from s3 import SECRETS, Fault, needs_packages, read, variables
from stores import a_rollout, some_rollouts

pytestmark = needs_packages


@pytest.fixture
def run(s3, place, finished):
    """A run in the store, and the same one here, with what no query needs."""
    for path in ("model/model.safetensors", "states/optimizer.safetensors"):
        (finished / path).parent.mkdir(parents=True)
        (finished / path).write_bytes(os.urandom(1000))
    export_run(finished, place)
    s3.requests.clear()
    return finished


def go_on(run) -> None:
    with RunDir.resume(run) as resumed:
        resumed.commit_rollouts("train", 2, [a_rollout(resumed.id, i, step=2) for i in range(3)])
        resumed.commit_metrics(2, "train", {"loss": 0.25})


def test_an_adapter_names_its_base_in_the_store(s3, place, finished, tmp_path):
    pytest.importorskip("peft", reason="peft is not installed: pip install -e '.[lora]'")
    shutil.copytree(builtin_model_path(), finished / "model")
    export_run(finished, place)
    base, own = str(place.below("done").below("model")), tmp_path / "own"
    load_policy(model_path(base), device="cpu", lora=Lora(2, 4, seed=0)).save(own)
    assert json.loads((own / "adapter_config.json").read_text())["base_model_name_or_path"] == base
    shutil.rmtree(tmp_path / "cache")
    views.forget()
    again = load_policy(own, device="cpu", lora=Lora(2, 4, seed=0))
    assert again.base == base
    assert model_identity(own)["base"] == base


def fetched(s3) -> set[str]:
    """What was read since the last call: names of files, without their sums."""
    names = {r.split("/runs/done/")[-1] for r in s3.requests if r.startswith("GET") and "list-type" not in r}
    s3.requests.clear()
    return {re.sub(r"\.[0-9a-f]{16}(?=\.)", "", name) for name in names}


QUERIES = [
    ("metrics", "--set", "names=%"),
    ("summary", "--phase", "eval"),
    ("SELECT phase, step, count(*) FROM rollouts GROUP BY ALL ORDER BY ALL",),
    ("rollouts", "--phase", "train"),
]


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query[0].split()[0])
def test_a_query_has_the_answer_of_the_local_run(s3, place, run, capsys, query):
    name, *options = query
    invoke(["analyze", name, str(run), *options])
    answer = capsys.readouterr().out
    assert len(answer.splitlines()) > 2
    invoke(["analyze", name, f"{place}/done", *options])
    said = capsys.readouterr()
    assert said.out == answer
    assert f"run {place}/done (finished)" in said.err
    needed = {INDEX, "run.json", "manifest.jsonl", "metrics.parquet"}
    parts = {
        "rollouts/train-000000-0000.parquet",
        "rollouts/train-000000-0001.parquet",
        "rollouts/eval-000001-0000.parquet",
    }
    assert fetched(s3) == needed | parts
    views.forget()  # as in another process
    invoke(["analyze", name, "done", "--runs-dir", str(place), *options])
    assert capsys.readouterr().out == answer
    assert fetched(s3) == {INDEX}


def test_the_list_of_runs_reads_what_it_shows(s3, place, run, capsys):
    with RunDir.create(run.parent, "eval", name="other", metadata={}) as other:
        other.commit_rollouts("eval", 0, some_rollouts(other, phase="eval"))
    export_run(other.path, place)
    with RunDir.create(run.parent, "eval", name="below", metadata={}) as below:
        below.commit_rollouts("eval", 0, some_rollouts(below, phase="eval"))
    export_run(below.path, place.below("folder"))
    shutil.rmtree(below.path)
    options = ("--format", "json", "--size")
    invoke(["runs", *options, "--runs-dir", str(run.parent)])
    answer = json.loads(capsys.readouterr().out)
    s3.requests.clear()
    invoke(["runs", *options, "--runs-dir", str(place)])
    found = json.loads(capsys.readouterr().out)
    assert [row["run_id"] for row in found] == ["other", "done"]
    assert [row | {"bytes": 0} for row in found] == [row | {"bytes": 0} for row in answer]
    remote = [views.remote_run(resolve_run(name, str(place))) for name in ("other", "done")]
    assert [row["bytes"] for row in found] == [sum(run.sizes().values()) for run in remote if run is not None]
    got = fetched(s3)
    assert not any("train-0000" in name or "optimizer" in name or "model" in name for name in got)
    assert any("eval-000001-0000" in name for name in got)


def test_names_patterns_and_the_latest(s3, place, run):
    with RunDir.create(run.parent, "eval", name="done-2", metadata={}) as other:
        pass
    export_run(other.path, place)
    root = str(place)
    assert [path.name for path in resolve_runs(["do*"], root).runs] == ["done", "done-2"]
    assert [path.name for path in resolve_runs([f"{root}/*-2", "done", f"{root}/done"], root).runs] == [
        "done-2",
        "done",
    ]
    assert resolve_run("done", f"{root}/") == resolve_run("done", root)
    assert latest_run(root).name == "done-2"
    assert [path.name for path in all_runs(root)] == ["done", "done-2"]
    assert (is_run("done", root), is_run("none", root), is_run(f"{root}/none", "runs")) == (True, False, False)
    assert resolve_runs([str(run)], root).runs == [run]
    with pytest.raises(RlvrError, match=rf"There is no run at {root}/none"):
        resolve_run(f"{root}/none", root)
    with pytest.raises(RlvrError, match="There is no run 'dona', neither in s3://") as raised:
        resolve_run("dona", root)
    assert raised.value.hint == "Did you mean: done, done-2?"
    with pytest.raises(RlvrError, match="No run matches 'x\\*'"):
        resolve_runs(["x*"], root)
    sweeps = str(place).removesuffix("/runs")
    assert [path.name for path in resolve_runs(["runs/do*"], sweeps).runs] == ["done", "done-2"]
    assert folders_of_runs(sweeps) == ["runs"]
    assert resolve_runs([f"{run.parent}/d*e"], root).runs == [run], "a path on this machine"
    with pytest.raises(RlvrError, match=f"{root}/done is a run") as raised:
        views.folder_of(f"{root}/done")
    assert raised.value.hint == f"Its model, if it has one, is {root}/done/model."


def test_other_commands_read_it_too(s3, place, run, tmp_path, capsys, monkeypatch):
    address = f"{place}/done"
    monkeypatch.chdir(tmp_path)
    invoke(["analyze", "report", address])
    assert not {name for name in fetched(s3) if name.endswith("safetensors")}
    assert "page done-report.html (" in capsys.readouterr().err
    assert "done" in (tmp_path / "done-report.html").read_text(), "and not in the cache, which is removed"
    invoke(["filter", address, "--out", str(tmp_path / "rows.jsonl")])
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 6
    assert len(rlvr_cli.open_run("done", runs_dir=str(place)).sql("SELECT * FROM rollouts")) == 9


def test_what_cannot_be_changed_there_is_refused(s3, place, run):
    with pytest.raises(RlvrError, match=rf"{place}/done is in object storage") as raised:
        invoke(["export", f"{place}/done", "--to", "csv"])
    assert raised.value.hint == f"Get it first: rlvr fetch {place}/done"


# Verification


def test_check_verifies_what_is_in_the_store_and_not_what_is_in_the_cache(s3, place, run, tmp_path, capsys):
    invoke(["check", f"{place}/done"])
    said = capsys.readouterr()
    assert "every byte of" in said.out
    assert f"run      {place}/done" in said.err
    assert {"model/model.safetensors", "states/optimizer.safetensors"} <= fetched(s3)
    store = Store(place.below("done"))
    keys = {key.partition(".")[0]: key for key in store.sizes()}
    key = keys["model/model"]
    data, tag = read(store, key)
    store.put(key, data[:-1] + bytes([data[-1] ^ 1]), replaces=tag)
    store.delete([keys["rollouts/train-000000-0001"]])
    views.forget()
    with pytest.raises(RlvrError, match=rf"{place}/done is not as it was committed: 2 problems"):
        invoke(["check", f"{place}/done"])
    said = capsys.readouterr().out
    kept = [path for path in (tmp_path / "cache" / "store" / "objects").rglob("*") if path.is_file()]
    assert [path.name for path in kept] == [hashlib.sha256(path.read_bytes()).hexdigest() for path in kept]
    assert f"{place}/done/{key} is damaged: its sha256 is not the one in the copy's index" in said
    assert f"{keys['rollouts/train-000000-0001']}: there is no such object" in said


def test_a_run_that_goes_on_while_it_is_checked_is_whole(s3, place, run):
    """Its writer replaces the manifest, and removes the one that the check's index names."""
    go_on(run)
    checked = resolve_run("done", str(place))

    def meanwhile(request: str) -> None:
        if request.startswith("GET") and "manifest" in request:
            s3.before = lambda request: None
            export_run(run, place)

    s3.before = meanwhile
    assert check_run(checked).problems == []


def test_a_part_that_the_index_lacks_is_a_problem(s3, place, run):
    store = Store(place.below("done"))
    data, tag = read(store, INDEX)
    record = json.loads(data)
    del record["files"]["rollouts/eval-000001-0000.parquet"]
    store.put(INDEX, json.dumps(record).encode(), replaces=tag)
    with pytest.raises(RlvrError, match=r"eval-000001-0000\.parquet is damaged: the index does not name it"):
        read_run(resolve_run("done", str(place)))


# A run that goes on


def test_a_run_stays_as_it_was_opened_until_one_looks_again(s3, place, run):
    before = resolve_run("done", str(place))
    go_on(run)
    export_run(run, place)
    assert read_rollouts(resolve_run("done", str(place))).num_rows == 9
    assert views.newest(before) == before
    views.look_again(seconds=3600)
    assert views.newest(before) == before
    views.look_again(seconds=0)
    after = views.newest(before)
    assert (read_rollouts(after).num_rows, read_rollouts(before).num_rows) == (12, 9)
    assert check_run(after).problems == []
    for step in range(3, 3 + views.KEPT):
        with RunDir.resume(run) as resumed:
            resumed.commit_metrics(step, "train", {"loss": 0.25})
        export_run(run, place)
        views.look_again(seconds=0)
        views.newest(before)
    assert not before.exists(), "old states are removed"
    assert source_of(before) is None, "and what they were, with the index of all their files, is forgotten"
    last = views.newest(after)
    views.forget()
    assert source_of(last) is None


def test_a_state_that_another_command_may_read_stays(s3, place, run):
    """It has opened that state, in a process of its own, while a view goes on to newer ones and removes its old ones."""
    opened = [resolve_run("done", str(place))]

    def go_on_to(steps) -> None:
        for step in steps:
            with RunDir.resume(run) as resumed:
                resumed.commit_metrics(step, "train", {"loss": 0.25})
            export_run(run, place)
            views.look_again(seconds=0)
            opened.append(views.newest(opened[-1]))

    views.forget()  # as another process, which finds the first state there, and reads it beside this one
    assert resolve_run("done", str(place)) == opened[0]
    go_on_to([3, 4])
    os.utime(opened[1].parent)  # as in a command that opens it now
    go_on_to(range(5, 5 + views.KEPT))
    assert [path.exists() for path in opened] == [True, True, False, *[True] * views.KEPT]
    os.utime(opened[3].parent, (0, 0))
    go_on_to([9])
    assert not opened[3].exists(), "nobody has opened it for long"


def test_the_view_shows_a_run_that_goes_on(s3, place, run, monkeypatch):
    pytest.importorskip("starlette", reason="starlette is not installed: pip install -e '.[view]'")
    from rlvr_cli.analysis.live import server
    from rlvr_cli.commands.store.view import named_runs
    from rlvr_cli.config.store.view import ViewConfig

    monkeypatch.setattr(server, "LOOKED_EVERY", 0.0)
    of_all = server.Library(*named_runs(ViewConfig(runs_dir=str(place))))
    also = server.Library(*named_runs(ViewConfig(runs=(str(place),))))
    of_one = server.Library(*named_runs(ViewConfig(runs=("done",), runs_dir=str(place))))
    assert of_all.title == f"Runs in {place}"
    assert [[*library.paths()] for library in (of_all, also, of_one)] == [["done"]] * 3
    go_on(run)
    export_run(run, place)
    for library in (of_all, of_one):
        assert read_rollouts(library.paths()["done"]).num_rows == 12


def test_an_empty_view_names_the_runs_of_folders(s3, place, run):
    testing = pytest.importorskip("starlette.testclient", reason="starlette is not installed: pip install -e '.[view]'")
    from rlvr_cli.analysis.live.server import Library, open_app

    with open_app(Library(str(place).removesuffix("/runs")), token="") as app:
        client = testing.TestClient(app, base_url="http://127.0.0.1")
        s3.faults.append(Fault("GET", f"runs/done/{INDEX}", "403"))
        refused = client.get("/")
        assert (refused.status_code, f"{place}/done/{INDEX}" in refused.text) == (503, True)
        s3.requests.clear()
        for _ in range(3):
            assert f"<code>rlvr view &#39;{place}/*&#39;</code>" in client.get("/").text
        assert len([path for path in s3.requests if f"runs/done/{INDEX}" in path]) == 1, (
            "each poll reads no index again"
        )


# The cache


def test_the_cache_has_a_bound(s3, place, run, tmp_path, monkeypatch):
    monkeypatch.setenv("RLVR_CACHE_GB", "0.00001")  # 10 kB: less than a run
    for name in ("a", "b"):
        with RunDir.create(run.parent, "eval", name=name, metadata={}) as other:
            other.commit_rollouts("eval", 0, some_rollouts(other, phase="eval"))
        export_run(other.path, place)
    folder = tmp_path / "cache" / "store"
    for name in ("a", "b"):
        read_rollouts(resolve_run(name, str(place)))
    assert len([*(folder / "runs").iterdir()]) == 2, "what was just opened stays"
    for opened in (folder / "runs").iterdir():
        os.utime(opened, (0, 0))
    views.forget()
    read_rollouts(resolve_run("done", str(place)))
    left = [path.name for path in (folder / "runs").glob("*/*")]
    assert left == ["done"]
    linked = {path.stat().st_ino for path in (folder / "runs").rglob("*") if path.is_file()}
    assert {path.stat().st_ino for path in (folder / "objects").rglob("*") if path.is_file()} <= linked


def test_files_of_states_that_a_view_has_removed_leave_the_cache_first(tmp_path, monkeypatch):
    """No run that was just opened has to go for them."""
    monkeypatch.setenv("RLVR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("RLVR_CACHE_GB", "0.00001")
    here = cache.Cache()
    for number in range(20):
        data = bytes([number]) * 1000
        state = here.run_directory("r", data)
        here.take(received([data]), state / "metrics.parquet", lambda data=data: [data], fresh=False, name="x")
        if number:
            here.drop(state)
    total, unused = here._sizes()
    assert (total <= 10_000, len([*(tmp_path / "store" / "runs").iterdir()])) == (True, 1)
    assert len(unused) < 10


def test_a_file_that_is_gone_when_the_cache_is_measured_is_left_out(s3, place, run, tmp_path, monkeypatch):
    """Another thread or process has renamed or removed it; here, a link to nothing."""
    monkeypatch.setenv("RLVR_CACHE_GB", "0.00001")
    for folder in ("objects/48", "runs"):
        (tmp_path / "cache/store" / folder).mkdir(parents=True)
        (tmp_path / "cache/store" / folder / "gone").symlink_to("nowhere")
    assert read_rollouts(resolve_run("done", str(place))).num_rows == 9


def test_without_links_the_cache_has_copies(s3, place, run, monkeypatch):
    def refuse(*paths):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(cache.os, "link", refuse)
    assert read_rollouts(resolve_run("done", str(place))).num_rows == 9
    views.forget()
    fetched(s3)
    assert read_rollouts(resolve_run("done", str(place))).num_rows == 9
    assert fetched(s3) == {INDEX}


def test_bad_settings_of_the_cache_are_errors(s3, place, run, monkeypatch):
    monkeypatch.setenv("RLVR_CACHE_GB", "much")
    with pytest.raises(RlvrError, match="RLVR_CACHE_GB is much, no number"):
        resolve_run("done", str(place))
    monkeypatch.delenv("RLVR_CACHE_GB")
    monkeypatch.delenv("RLVR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    with pytest.raises(RlvrError, match="There is no place for the cache"):
        resolve_run("done", str(place))


# Faults


@pytest.mark.parametrize("kind", ["500", "503", "cut", "lost", "short", "slow"])
def test_faults_of_the_store_cost_nothing_but_time(s3, place, run, kind):
    s3.faults += [Fault("GET", path, kind) for path in ("index", "run.", "rollouts/", "manifest.")]
    s3.faults += [Fault("GET", "list-type", kind)]
    assert [read_rollouts(path).num_rows for path in all_runs(str(place))] == [9]
    assert s3.faults == []


def test_one_broken_index_does_not_hide_the_others(s3, place, run, capsys):
    Store(place.below("broken")).put(INDEX, b"{}", replaces=None)
    assert [path.name for path in all_runs(str(place))] == ["done"]
    assert f"left out: {place}/broken/{INDEX} is not the index of a run" in capsys.readouterr().err
    with pytest.raises(RlvrError, match="there is no such bucket"):
        all_runs("s3://no-such-bucket/runs")


def test_secrets_are_not_in_the_cache_nor_in_what_is_said(s3, place, run, tmp_path, forks):
    def call(*command, status=0):
        cached = {"RLVR_CACHE_DIR": str(tmp_path / "cache")}
        return forks.run(*command, cwd=tmp_path, environment=variables(s3) | cached, status=status).said

    said = [
        call("check", f"{place}/done"),
        call("runs", "--runs-dir", place),
        call("analyze", "x", "--runs-dir", place, status=2),
    ]
    said.append(call("analyze", "report", "done", "--runs-dir", place, "--out", "r.html"))
    s3.faults.append(Fault("GET", INDEX, "403"))
    said.append(call("check", f"{place}/done", status=1))
    assert "it is refused (403" in said[-1]
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in SECRETS.values():
        assert secret not in "".join(said)
        assert secret.encode() not in written
