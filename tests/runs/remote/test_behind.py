"""Runs that are written for object storage: local first, uploaded behind, by one writer; nothing that was there is ever lost."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import upload_writer
from killed import GRPO, assert_ended_as, go_on
from rlvr_cli.cli import invoke
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs import run_dir
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.readers import read_metadata, read_rollouts, read_run, resolve_run
from rlvr_cli.runs.remote import behind, follow, lease, snapshot, views
from rlvr_cli.runs.remote.copies import export_run, fetch_run
from rlvr_cli.runs.remote.follow import Uploader
from rlvr_cli.runs.remote.index import INDEX, LEASE, parsed_index
from rlvr_cli.runs.remote.lease import Lease
from rlvr_cli.runs.remote.store import Store
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.trackers.children import tracked
from s3 import SECRETS, Fault, needs_packages, read, variables
from stores import a_rollout, as_killed, tree, with_links_of_wandb
from upload_writer import PARTS, rows_of

pytestmark = needs_packages
SOON = 30.0  # seconds: of a machine that does much else


def step(run: RunDir, number: int) -> None:
    run.commit_rollouts("train", number, [a_rollout(run.id, i, step=number) for i in range(3)])
    run.commit_metrics(number, "train", {"loss": 0.5})


def files(run: Path) -> dict[str, bytes | str]:
    return {path: data for path, data in tree(run).items() if path != ".lock"}


def rows_there(place) -> int:
    views.forget()
    return read_rollouts(resolve_run("r", str(place))).num_rows


def steps_there(place) -> set[int]:
    views.forget()
    return set(read_rollouts(resolve_run("r", str(place)))["step"].to_pylist())


def until(condition, *, seconds: float = SOON) -> float:
    """Wait for something, and return for how long."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not happen"
        time.sleep(0.05)
    return time.monotonic() - began


def is_there(place, rows: int):
    return lambda: Store(place.below("r")).read(INDEX) is not None and rows_there(place) >= rows


@contextmanager
def elsewhere(monkeypatch, folder: Path):
    """As on another machine, which has nothing yet."""
    with monkeypatch.context() as patch:
        patch.setenv("RLVR_CACHE_DIR", str(folder))
        views.forget()
        yield
    views.forget()


def test_a_run_is_in_the_store_while_it_is_written(s3, place, tmp_path, capsys):
    with RunDir.create(str(place), "grpo", name="r", metadata={}) as run:
        assert run.path == tmp_path / "cache" / "work" / place.bucket / place.prefix / "r"
        assert run.place == f"{place}/r"
        for number in range(2):
            step(run, number)
            until(is_there(place, 3 * number + 3))
        there = resolve_run("r", str(place))
        assert read_metadata(there)["status"] == "running"
        assert lease.holder_in(Store(place.below("r")))["pid"] == os.getpid()
        invoke(["check", f"{place}/r"])
        assert f"it is being written by process {os.getpid()}" in capsys.readouterr().err
    said = capsys.readouterr().err
    assert f"uploaded to {place}/r" in said
    assert files(fetch_run(place.below("r"), tmp_path / "b")[0]) == files(run.path)
    index = parsed_index(read(Store(place.below("r")), INDEX)[0], where="")
    assert set(Store(place.below("r")).sizes()) == {INDEX, *index.keys.values()}, "no lease, and no old versions"
    assert not any("upload" in request for request in s3.requests), "a small file is one put, not an upload in parts"


def test_at_every_moment_the_store_has_a_run(s3, place, tmp_path):
    """Whoever fetches it while it is written gets one that is whole."""
    states: list[int] = []
    problems: list[str] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            if Store(place.below("r")).read(INDEX) is None:
                continue
            try:
                path, _ = fetch_run(place.below("r"), tmp_path / f"b{len(states)}")
            except RlvrError as error:
                problems.append(error.problem)
                shutil.rmtree(tmp_path / f"b{len(states)}", ignore_errors=True)
                continue
            assert check_run(path).problems == []
            states.append(read_rollouts(path).num_rows)

    with RunDir.create(str(place), "grpo", name="r", metadata={}) as run:
        looker = threading.Thread(target=look)
        looker.start()
        for number in range(12):
            step(run, number)
            time.sleep(0.3)
    ended.set()
    looker.join()
    assert all("there is no such object" in problem for problem in problems), "replaced meanwhile"
    assert states == sorted(states)
    assert len(set(states)) > 2


def test_rows_do_not_wait_for_a_checkpoint(s3, place, tmp_path):
    """The checkpoint is held up; the rows of later steps arrive; then the checkpoint does, although the run has removed it."""
    held, free = threading.Event(), threading.Event()

    def hold(request: str) -> None:
        if request.startswith("PUT") and "checkpoints/step-000001/policy" in request:
            held.set()
            assert free.wait(SOON)

    s3.before = hold
    with RunDir.create(str(place), "grpo", name="r", metadata={}) as run:
        folder = run.path / "checkpoints" / "step-000001"
        folder.mkdir(parents=True)
        (folder / "policy.safetensors").write_bytes(b"weights")
        step(run, 0)
        assert held.wait(SOON)
        step(run, 1)
        until(is_there(place, 6))
        index = parsed_index(read(Store(place.below("r")), INDEX)[0], where="")
        assert not any(path.startswith("checkpoints") for path in index.files)
        shutil.rmtree(folder)
        free.set()
        step(run, 2)
        until(
            lambda: (
                "checkpoints/step-000001/policy.safetensors"
                in parsed_index(read(Store(place.below("r")), INDEX)[0], where="").files
            )
        )
        (folder.parent / "step-000003").mkdir()
        (folder.parent / "step-000003" / "policy.safetensors").write_bytes(b"other weights")
    index = parsed_index(read(Store(place.below("r")), INDEX)[0], where="")
    assert "checkpoints/step-000003/policy.safetensors" in index.files
    assert set(index.files) == set(files(run.path)), "at the end it is the run as it is"


def test_a_name_that_is_taken_there_is_refused(s3, place, finished):
    export_run(finished, place)
    with pytest.raises(RlvrError, match=rf"{place}/done exists already"):
        invoke(["eval", "--model", "none", "--run", "done", "--runs-dir", str(place)])
    with (
        pytest.raises(RlvrError, match=rf"{place}/done exists already"),
        RunDir.create(str(place), "eval", name="done", metadata={}),
    ):
        pass
    for command in ("eval --model none", "quickstart", "sweep grpo_baselines"):
        with pytest.raises(RlvrError, match="there is no such bucket"):
            invoke([*command.split(), "--runs-dir", "s3://no-such-bucket/runs"])


def test_what_others_have_put_there_stays(s3, place):
    """Files of a killed writer are removed, and those of nobody's run are not ours."""
    there = Store(place.below("r"))
    others = ("notes.txt", "data/train.parquet")
    left = ("rollouts/train-00000000.0123456789abcdef.parquet", ".clock.0123456789abcdef")
    for key in (*others, *left):
        there.put_file(key, b"x", size=1)
    with RunDir.create(str(place), "grpo", name="r", metadata={}) as run:
        step(run, 0)
    assert {*others} <= there.sizes().keys()
    assert not {*left} & there.sizes().keys()


def test_a_run_leaves_the_runs_below_its_name_alone(s3, place, finished):
    """One that an earlier version let begin there; a new one is refused."""
    export_run(finished, place.below("abl"))
    begun = Store(place.below("abl").below("begun"))
    Lease.acquire(begun)
    begun.put_file(key := "rollouts/train-000000-0000.0123456789abcdef.parquet", b"x", size=1)
    above = Store(place.below("abl"))
    before = above.sizes()
    with (
        pytest.raises(RlvrError, match=rf"{place}/abl has runs below it, such as {place}/abl/begun") as raised,
        RunDir.create(str(place), "grpo", name="abl", metadata={}),
    ):
        pass
    assert f"--runs-dir {place}/abl" in raised.value.hint
    above.put_file(key, b"x", size=1)  # of a writer that was killed
    lease_of_above = Lease.acquire(above)
    Uploader(finished, lease_of_above)
    lease_of_above.release()
    assert above.sizes() == before


def test_a_run_that_wandb_has_put_links_into_is_uploaded_exported_and_resumed(s3, place, tmp_path):
    with RunDir.create(str(place), "grpo", name="r", metadata={}) as run:
        with_links_of_wandb(run.path)
        step(run, 0)
        until(is_there(place, 3))
    path, _ = fetch_run(place.below("r"), tmp_path / "b")
    assert files(path) == {name: data for name, data in files(run.path).items() if isinstance(data, bytes)}
    assert (path / "wandb" / "run-1" / "run-1.wandb").read_bytes() == b"history"
    assert export_run(run.path, place).moved == 0
    views.forget()
    with RunDir.resume(resolve_run("r", str(place))) as again:
        step(again, 1)
    assert rows_there(place) == 6


def test_large_files_are_uploaded_while_they_grow(s3, place, finished, monkeypatch):
    """As far as they were when the run was looked at, though they grow before they are sent; one that was replaced waits."""
    monkeypatch.setattr(snapshot, "IN_MEMORY", 1000)
    log = finished / "wandb" / "run.wandb"
    log.parent.mkdir()
    log.write_bytes(b"x" * 2000)
    as_killed(finished)
    store = Store(place.below("done"))
    uploader, take = Uploader(finished, Lease.acquire(store)), snapshot.take

    def there_after(change, *, whole: bool) -> int:
        def changed(run, known):
            taken = take(run, known)
            change()
            return taken

        monkeypatch.setattr(snapshot, "take", changed)
        uploader.sync(whole=whole)
        return parsed_index(read(store, INDEX)[0], where="").files["wandb/run.wandb"].bytes

    def grow() -> None:
        with log.open("ab") as file:
            file.write(b"y" * 10)

    def replace() -> None:
        (finished / ".new.tmp").write_bytes(b"z" * 3000)
        (finished / ".new.tmp").rename(log)

    assert there_after(grow, whole=False) == 2000
    with pytest.raises(RlvrError, match="still changes"):
        there_after(replace, whole=True)
    assert there_after(grow, whole=True) == 3000
    assert {seen.data for seen in uploader._known.values()} == {None}, "what was sent is not held in memory"


def test_what_a_tracker_writes_last_is_uploaded(s3, place, tmp_path):
    """It has the last row only once the run has ended."""
    with (
        tracked(["csv"], project="") as trackers,
        RunDir.create(str(place), "grpo", name="r", metadata={}) as run,
    ):
        trackers.start(run)
        for number in range(3):
            run.commit_metrics(number, "train", {"reward/mean": 0.5})
    path, _ = fetch_run(place.below("r"), tmp_path / "b")
    assert (path / "csv" / "train.csv").read_text().count("\n") == 4
    assert files(path) == files(run.path)


# One writer


def test_a_second_writer_is_refused_and_told_of_the_first(s3, place, tmp_path, monkeypatch):
    with RunDir.create(str(place), "grpo", name="r", metadata={}) as run:
        step(run, 0)
        until(is_there(place, 3))
        with elsewhere(monkeypatch, tmp_path / "other"):
            path = resolve_run("r", str(place))
            with pytest.raises(
                RlvrError, match=rf"is being written by process {os.getpid()} on .*; its last sign of life"
            ) as raised:
                RunDir.resume(path)
            assert "takes the run over 60 s after" in raised.value.hint
            with pytest.raises(RlvrError, match="is being written by process"):
                invoke(["grpo", "--resume", f"{place}/r"])
        with pytest.raises(RlvrError, match="is being written by process"):
            export_run(run.path, place)
        step(run, 1)
    assert rows_there(place) == 6


def test_a_writer_that_slept_is_stopped_and_overwrites_nothing(s3, place, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "FREE_AFTER", -10.0)  # whoever has it is taken for dead
    paths = []

    def both_write() -> None:
        with RunDir.create(str(place), "grpo", name="r", metadata={}) as first:
            paths.append(first.path)
            step(first, 0)
            until(is_there(place, 3))
            with elsewhere(monkeypatch, tmp_path / "other"), RunDir.resume(resolve_run("r", str(place))) as second:
                step(second, 1)
                until(is_there(place, 6))
                for number in range(10, 10 + int(SOON)):
                    step(first, number)
                    time.sleep(1.0)
                    assert steps_there(place) == {0, 1}

    with pytest.raises(RlvrError, match=rf"{place}/r was taken over by"):
        both_write()
    assert rows_there(place) == 6
    assert steps_there(place) == {0, 1}
    assert read_run(paths[0]).metadata["status"] == "running", "as after a kill"


def test_a_dead_process_of_this_machine_holds_nothing(s3, place, finished):
    export_run(finished, place)
    store = Store(place.below("done"))
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    own = Lease.acquire(store)
    store.put(
        LEASE, own.data.replace(str(os.getpid()).encode(), str(dead.pid).encode()), replaces=read(store, LEASE)[1]
    )
    Lease.acquire(store).release()
    assert store.read(LEASE) is None
    store.put(LEASE, b"nonsense", replaces=None)
    Lease.acquire(store).release()


@pytest.mark.parametrize("machine", [{"machine": "another boot, or another container"}, {}])
def test_a_process_that_cannot_be_seen_from_here_is_not_taken_for_dead(s3, place, machine):
    """Two containers may have one host name, and each its own numbers of processes; an earlier version does not say which."""
    store = Store(place.below("r"))
    with subprocess.Popen([sys.executable, "-c", ""]) as elsewhere:
        elsewhere.wait()
    record = json.loads(Lease.acquire(store).data)
    del record["machine"]
    data = json.dumps(record | {"pid": elsewhere.pid} | machine).encode()
    store.put(LEASE, data, replaces=read(store, LEASE)[1])
    with pytest.raises(RlvrError, match=f"is being written by process {elsewhere.pid}"):
        Lease.acquire(store)


def test_of_two_that_take_it_at_once_one_has_it(s3, place):
    stores = [Store(place.below("r")) for _ in range(8)]
    won: list[Lease] = []
    lost: list[str] = []

    def race(store: Store) -> None:
        try:
            won.append(Lease.acquire(store))
        except RlvrError as error:
            lost.append(error.problem)

    threads = [threading.Thread(target=race, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    won[0].renew()
    won[0].release()
    with pytest.raises(RlvrError, match="was taken over"):
        won[0].renew()


def test_runs_without_a_name_that_start_in_one_minute_are_counted(s3, place, tmp_path, monkeypatch):
    """As on a disk: of the first, there is a lease alone, and of the second the lease is lost at the last moment."""
    monkeypatch.setattr(run_dir, "made_name", lambda command, about: "grpo-q")
    Lease.acquire(Store(place.below("grpo-q")))
    second = Store(place.below("grpo-q-2"))

    def meanwhile(request: str) -> None:
        if request.startswith("PUT") and f"grpo-q-2/{LEASE}" in request:
            s3.before = lambda request: None
            Lease.acquire(second)

    s3.before = meanwhile
    with RunDir.create(str(place), "grpo", metadata={}) as run:
        assert run.id == "grpo-q-3"
    with (
        pytest.raises(RlvrError, match="is being written by"),
        RunDir.create(str(place), "grpo", name="grpo-q", metadata={}),
    ):
        pass


# Resuming


def test_the_lease_is_renewed_while_a_run_is_fetched(s3, place, tmp_path, monkeypatch):
    """The fetch is held up until the lease has been renewed twice; in the second one, another process takes the run over."""
    monkeypatch.setattr(lease, "RENEWED_EVERY", 0.05)
    with RunDir.create(str(place), "grpo", name="r", metadata={}) as run:
        step(run, 0)
    there = Store(place.below("r"))
    signs: list[str] = []
    fetching = threading.Event()

    def hold(request: str) -> None:
        if request.startswith("PUT") and LEASE in request:
            signs.append(request)
        if request.startswith("GET") and "rollouts/" in request and fetching.is_set():
            fetching.clear()
            before = len(signs)
            until(lambda: len(signs) > before + 1)

    s3.before = hold
    fetching.set()
    with elsewhere(monkeypatch, tmp_path / "other"), RunDir.resume(resolve_run("r", str(place))) as other:
        assert not fetching.is_set()
        step(other, 1)
    assert rows_there(place) == 6

    def take_over(request: str) -> None:
        if request.startswith("GET") and "rollouts/" in request and fetching.is_set():
            fetching.clear()
            there.put_file(LEASE, theirs, size=len(theirs))
            time.sleep(1.0)

    theirs = b'{"id": "x", "pid": 1, "host": "another", "since": "now"}'
    s3.before = take_over
    fetching.set()
    with (
        elsewhere(monkeypatch, tmp_path / "third"),
        pytest.raises(RlvrError, match="was taken over by process 1 on another"),
        RunDir.resume(resolve_run("r", str(place))),
    ):
        pass
    assert read(there, LEASE)[0] == theirs


def test_a_run_goes_on_in_an_empty_folder_and_comes_back(s3, place, tmp_path, monkeypatch):
    with RunDir.create(str(place), "grpo", name="r", metadata={}) as run:
        step(run, 0)
    with elsewhere(monkeypatch, tmp_path / "other"):
        with RunDir.resume(resolve_run("r", str(place))) as other:
            assert other.path.is_relative_to(tmp_path / "other")
            step(other, 1)
        there = files(other.path)
    views.forget()
    with RunDir.resume(resolve_run("r", str(place))) as again:  # where its directory is older than the store
        assert again.path == run.path
        assert again.num_rollouts() == 6
    assert {k: v for k, v in files(again.path).items() if k != "run.json"} == {
        k: v for k, v in there.items() if k != "run.json"
    }
    with RunDir.resume(run.path) as ahead:  # not uploaded
        step(ahead, 2)
    views.forget()
    with RunDir.resume(resolve_run("r", str(place))) as again:
        assert again.num_rollouts() == 9
    assert rows_there(place) == 9
    with elsewhere(monkeypatch, tmp_path / "other"), RunDir.resume(resolve_run("r", str(place))) as other:
        step(other, 3)
    with RunDir.resume(run.path) as apart:
        step(apart, 4)
    views.forget()
    with pytest.raises(RlvrError, match=r"has what .* has not, and the other way round"):
        RunDir.resume(resolve_run("r", str(place)))
    assert Store(place.below("r")).read(LEASE) is None


def test_grades_are_added_there(s3, place, finished, capsys):
    export_run(finished, place)
    invoke(["grade", f"{place}/done", "--grader", "question_only"])
    assert "no_answer_tags" in capsys.readouterr().out
    views.forget()
    path = resolve_run("done", str(place))
    assert sum(entry.rows for entry in read_run(path).entries if entry.folder == "grades") == 9
    assert check_run(path).problems == []


# Faults


@pytest.mark.parametrize("kind", ["500", "503", "cut", "lost", "slow", "flip", "stale"])
def test_faults_of_the_store_cost_nothing_but_time(s3, place, tmp_path, kind):
    requests = (
        [("GET", "list-type")] * 2 if kind == "stale" else [("PUT", "run."), ("PUT", "manifest."), ("PUT", "rollouts/")]
    )
    s3.faults += [Fault(*request, kind) for request in requests]
    if kind not in ("flip", "stale"):
        s3.faults += [Fault("PUT", INDEX, kind), Fault("GET", "metrics.", kind)]
    with RunDir.create(str(place), "grpo", name="r", metadata={}) as run:
        step(run, 0)
    assert s3.faults == []
    assert files(fetch_run(place.below("r"), tmp_path / "b")[0]) == files(run.path)


def test_a_store_that_stays_broken_never_stops_the_run_and_export_goes_on(s3, place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(behind, "PATIENCE", 1.0)
    paths = []

    def write() -> None:
        with RunDir.create(str(place), "grpo", name="r", metadata={}) as run:
            paths.append(run.path)
            step(run, 0)
            until(is_there(place, 3))
            s3.faults += [Fault("PUT", "rollouts/", "403")] * 1000
            step(run, 1)
            until(lambda: len(s3.faults) < 1000)

    with pytest.raises(
        RlvrError, match=rf"The run is not whole at {place}/r: Cannot write .* it is refused \(403"
    ) as raised:
        write()
    (path,) = paths
    s3.faults.clear()
    assert read_run(path).metadata["status"] == "finished"
    assert f"rlvr export {path} --to {place}" in raised.value.hint
    assert "The run goes on, and is uploaded later" in capsys.readouterr().err
    assert rows_there(place) == 3
    export_run(path, place)
    assert rows_there(place) == 6


def test_an_upload_at_the_end_may_take_long_and_fail_in_between(s3, place, finished, monkeypatch):
    """The store has its time from a failure on, and all of it again once something has arrived; then the upload is given up."""
    monkeypatch.setattr(follow, "AGAIN", 0.05)
    own, patience = Lease.acquire(Store(place.below("done"))), 0.4

    def upload() -> None:
        follow.follow(finished, own, patience=patience, ended=lambda seconds: True, say=print)

    s3.before = lambda request: time.sleep(1.2 * patience) if request.startswith("PUT") else None
    s3.faults += [Fault("PUT", "run.", "403"), Fault("PUT", INDEX, "403")]
    upload()
    assert s3.faults == []
    s3.before = lambda request: None
    (finished / "notes.txt").write_text("more")
    s3.faults += [Fault("PUT", "notes", "403")] * 1000
    with pytest.raises(RlvrError, match="it is refused"):
        upload()
    assert len(s3.faults) < 999


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("kill", "the process of the upload ended with status -9; another goes on"),
        ("enospc", "the upload waits: its process failed with OSError (No space left on device). The run goes on"),
    ],
    ids=["kill", "enospc"],
)
def test_an_upload_process_that_is_killed_or_meets_an_error_goes_on(
    s3, place, tmp_path, monkeypatch, capsys, action, said
):
    monkeypatch.setenv("RLVR_FAULT", f"upload.upload:2:{action}")
    with RunDir.create(str(place), "grpo", name="r", metadata={}) as run:
        monkeypatch.delenv("RLVR_FAULT")
        step(run, 0)
    assert said in capsys.readouterr().err
    assert files(fetch_run(place.below("r"), tmp_path / "b")[0]) == files(run.path)


def test_an_error_of_the_thread_for_checkpoints_is_raised_by_the_next_look(s3, place, finished, monkeypatch):
    as_killed(finished)
    store = Store(place.below("done"))
    uploader = Uploader(finished, Lease.acquire(store))
    uploader.sync(whole=False)
    weights = finished / "checkpoints" / "step-000001" / "policy.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    monkeypatch.setenv("RLVR_FAULT", "upload:1:enospc")
    with pytest.raises(OSError, match="No space left"):
        until(lambda: uploader.sync(whole=False))

    def is_named() -> bool:
        uploader.sync(whole=False)
        return weights.relative_to(finished).as_posix() in parsed_index(read(store, INDEX)[0], where="").files

    until(is_named)


def test_an_upload_process_that_cannot_run_is_told_and_the_run_keeps_its_place(
    s3, place, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(lease, "RENEWED_EVERY", 0.05)
    monkeypatch.setattr(behind, "RESTARTS", 2)
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))  # with which a Python ends at once, with status 1

    def signs() -> int:
        return len([request for request in s3.requests if request.startswith("PUT") and LEASE in request])

    def write() -> None:
        with RunDir.create(str(place), "grpo", name="r", metadata={}) as run:
            before = signs()
            until(lambda: signs() > before + 1)
            step(run, 0)

    with pytest.raises(
        RlvrError, match=rf"The run is not whole at {place}/r: its process ended with status 1"
    ) as raised:
        write()
    path = tmp_path / "cache" / "work" / place.bucket / place.prefix / "r"
    said, before = capsys.readouterr().err, signs()
    assert f"rlvr export {path} --to {place}" in raised.value.hint
    assert said.count("the process of the upload ended with status 1; another goes on") == 1
    assert (
        said.count(f"note: the upload to {place}/r has stopped: its process ended with status 1. The run goes on") == 1
    )
    export_run(path, place)
    assert rows_there(place) == 3
    assert signs() <= before + 1, "nobody has it any more"


def test_ctrl_c_in_the_final_wait_ends_the_upload_and_says_where_the_run_is(s3, place, capsys, request):
    """The store answers no more; the main thread is interrupted while it waits."""
    free = threading.Event()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background of a shell lacks
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def hold(asked: str) -> None:
        if asked.startswith("PUT") and "rollouts/" in asked:
            until(lambda: run._upload._ending)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            assert free.wait(SOON)

    s3.before = hold
    run = RunDir.create(str(place), "grpo", name="r", metadata={})
    step(run, 0)
    watcher = run._upload._watcher
    with pytest.raises(KeyboardInterrupt):
        run.close()
    free.set()
    until(lambda: watcher not in threading.enumerate())
    said = capsys.readouterr().err
    assert f"note: The run is not whole at {place}/r: the upload was interrupted." in said
    assert f"rlvr export {run.path} --to {place}" in said
    assert "another goes on" not in said


def begun(s3, place, cache: Path, *, steps: int) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
    environment = os.environ | variables(s3) | {"RLVR_CACHE_DIR": str(cache), "PYTHONPATH": path}
    command = [sys.executable, upload_writer.__file__, str(place), "r", str(steps)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def killed_at_random(s3, place, folder: Path, *, kills: int, seed: int) -> None:
    """A writer and its upload are killed together, at random moments; what goes on has an empty folder every second time.

    At every second kill something is there already, however slow the machine is.
    """
    moments, cache, rows = random.Random(seed), folder / "0", 0
    for number in range(kills):
        writer = begun(s3, place, cache, steps=100_000)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        if number % 2:
            until(is_there(place, 1))
        time.sleep(moments.uniform(0.0, 3.0))
        uploads = children_of(writer.pid)
        for pid in moments.sample([writer.pid, *uploads], 1 + len(uploads)):
            os.kill(pid, signal.SIGKILL)
        writer.stdout.close()
        writer.wait()
        if Store(place.below("r")).read(INDEX) is None:
            shutil.rmtree(cache)  # the machine is gone, and nothing was there yet
            continue
        path, _ = fetch_run(place.below("r"), folder / f"seen{number}")
        assert check_run(path).problems == []
        found = read_rollouts(path).num_rows
        assert found >= rows, "what was there is there"
        rows, cache = found, folder / str(number // 2)
        shutil.rmtree(path)
    views.forget()
    last = max(read_rollouts(resolve_run("r", str(place)))["step"].to_pylist(), default=0) + 2
    writer = begun(s3, place, folder / "last", steps=last)
    writer.communicate()
    assert writer.returncode == 0
    views.forget()
    path = resolve_run("r", str(place))
    assert check_run(path).problems == []
    expected = [
        (number, r.example_id, r.sample_index, r.response)
        for number in range(last)
        for part in range(PARTS)
        for r in rows_of("r", step=number, part=part)
    ]
    columns = ("step", "example_id", "sample_index", "response")
    table = read_rollouts(path, columns=columns)
    assert sorted(zip(*(table[name].to_pylist() for name in columns), strict=True)) == sorted(expected)


@pytest.mark.slow
def test_an_upload_is_killed_at_random_moments(s3, place, tmp_path):
    killed_at_random(s3, place, tmp_path, kills=2, seed=0)


@pytest.mark.full
def test_an_upload_is_killed_at_20_random_moments(s3, place, tmp_path):
    killed_at_random(s3, place, tmp_path, kills=20, seed=1)


# Commands


@pytest.mark.slow
def test_a_killed_training_goes_on_on_another_machine_with_the_same_bytes(s3, place, tmp_path, forks):
    """Nothing of the first machine is left but what was in the store. No secret is in a file, nor in what is said."""

    def call(*command, cache, **how):
        environment = variables(s3) | {"RLVR_CACHE_DIR": str(tmp_path / cache)}
        return forks.run(*command, cwd=tmp_path / cache, environment=environment, **how)

    for name in ("whole", "first", "second"):
        (tmp_path / name).mkdir()
    go_on(forks, tmp_path / "whole" / "runs" / "r", GRPO)
    first = call(*GRPO, "--run", "r", "--runs-dir", place, cache="first", fault="update:4", status=-signal.SIGKILL)
    until(lambda: Store(place.below("r")).read(LEASE) is None)  # what was committed is uploaded without the process
    shutil.rmtree(tmp_path / "first")
    second = call("grpo", "--resume", f"{place}/r", cache="second", status=0)
    run = tmp_path / "second" / "work" / place.bucket / place.prefix / "r"
    assert_ended_as(tmp_path / "whole" / "runs" / "r", run)
    assert files(fetch_run(place.below("r"), tmp_path / "third")[0]) == files(run)
    assert read_metadata(run)["config"]["runs_dir"] == str(place)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in SECRETS.values():
        assert secret not in first.said + second.said
        assert secret.encode() not in written + bytes(s3.heard.partition(b"\r\n\r\n")[2])


def test_an_evaluation_is_written_there(s3, place, tiny_model_dir, capsys):
    words = ["--dataset", "arithmetic:4", "--sampling-max-tokens", "4", "--run", "e", "--runs-dir", str(place)]
    invoke(["eval", "--model", str(tiny_model_dir), *words])
    said = capsys.readouterr().err
    assert f"upload   {place}/e" in said
    assert f"uploaded to {place}/e" in said
    assert read_rollouts(resolve_run("e", str(place))).num_rows == 4
