"""Copies of runs in object storage, on moto's server: nothing is lost or half there, whatever store, network or process do."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from killed import GRPO, assert_ended_as, go_on
from rlvr_cli.cli import invoke
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.lock import LOCK
from rlvr_cli.runs.remote import store as storing
from rlvr_cli.runs.remote.copies import brought_run, export_run, fetch_run, read_remote_index
from rlvr_cli.runs.remote.index import INDEX, parsed_index
from rlvr_cli.runs.remote.store import Changed, Store, parsed_address
from rlvr_cli.runs.run_dir import RunDir
from s3 import SECRETS, SLOW, Fault, needs_packages, read, variables
from stores import a_rollout, tree

pytestmark = needs_packages


def files(run: Path) -> dict[str, bytes | str]:
    return {path: data for path, data in tree(run).items() if path != LOCK}


def longer(run: Path) -> None:
    """Let a run go on for a step."""
    with RunDir.resume(run) as resumed:
        resumed.commit_rollouts("train", 2, [a_rollout(resumed.id, i, step=2) for i in range(3)])
        resumed.commit_metrics(2, "train", {"loss": 0.25})


def stored(place) -> dict[str, int]:
    return Store(place).sizes()


# To and fro


def test_a_run_comes_back_as_it_was_and_nothing_is_sent_twice(s3, place, finished, tmp_path):
    (finished / "model").mkdir()
    (finished / "model" / "big.safetensors").write_bytes(os.urandom(storing.PART_BYTES + 1))  # in two parts
    (finished / ".lock.tmp").write_bytes(b"of a write that was cut")
    sent = export_run(finished, place)
    assert sent.moved == sent.files == len(files(finished)) - 1
    path, fetched = fetch_run(place.below("done"), tmp_path / "elsewhere")
    assert (path, fetched.moved) == (tmp_path / "elsewhere" / "done", sent.files)
    assert files(path) == {name: data for name, data in files(finished).items() if name != ".lock.tmp"}
    assert check_run(path).problems == []
    assert export_run(finished, place).moved == fetch_run(place.below("done"), tmp_path / "elsewhere")[1].moved == 0
    assert len([r for r in s3.requests if r.startswith("PUT") and INDEX in r]) == 1


def test_the_index_comes_last_and_old_versions_go(s3, place, finished, tmp_path):
    export_run(finished, place)
    before = stored(place)
    longer(finished)
    s3.requests.clear()
    export_run(finished, place)
    writes = [r.split("?")[0].split(f"{place.prefix}/done/")[-1] for r in s3.requests if r[:3] in ("PUT", "POS")]
    assert writes.index(INDEX) == len(writes) - 2  # after it only the old versions are deleted
    assert "rollouts/train-000002-0000" in " ".join(writes)
    now = stored(place)
    gone = {key.split("/")[-1].split(".")[0] for key in before.keys() - now.keys()}
    assert gone == {"run", "manifest", "metrics"}
    assert files(fetch_run(place.below("done"), tmp_path / "b")[0]) == files(finished)


def test_a_run_goes_on_elsewhere_and_comes_back(s3, place, finished, tmp_path):
    """A copy is never replaced by an older state of the run, nor by another run."""
    export_run(finished, place)
    path, _ = fetch_run(place.below("done"), tmp_path / "b")
    longer(path)
    export_run(path, place)
    with pytest.raises(RlvrError, match=r"gone on elsewhere: it has rollouts/train-000002-0000\.parquet") as raised:
        export_run(finished, place)
    assert raised.value.hint == f"Get it with rlvr fetch {place}/done"
    with pytest.raises(RlvrError, match="exists already, and is not as the copy"):
        fetch_run(place.below("done"), finished.parent)
    shutil.rmtree(finished)
    assert files(fetch_run(place.below("done"), finished.parent)[0]) == files(path)
    with RunDir.create(tmp_path / "c", "grpo", name="done", metadata={}):
        pass
    with pytest.raises(RlvrError, match="is another run, created at"):
        export_run(tmp_path / "c" / "done", place)


def test_of_a_run_that_has_gone_on_elsewhere_only_what_is_new_is_fetched(s3, place, finished, tmp_path):
    """Also where this was cut once the directory here had been put aside."""
    export_run(finished, place)
    other, _ = fetch_run(place.below("done"), tmp_path / "b")
    longer(other)
    export_run(other, place)
    index, old = read_remote_index(Store(place.below("done"))), finished.parent / ".done.old"

    def fetched_by_bringing_it() -> set[str]:
        s3.requests.clear()
        assert brought_run(place.below("done"), index, finished.parent) == finished
        assert files(finished) == files(other)
        assert not old.exists()
        keys = [r.split("/runs/done/")[-1].split(".")[0] for r in s3.requests if r.startswith("GET") and INDEX not in r]
        return {*keys}

    assert fetched_by_bringing_it() == {"run", "manifest", "metrics", "rollouts/train-000002-0000"}
    finished.rename(old)
    (old / "run.json").unlink()
    assert fetched_by_bringing_it() == {"run"}


def test_work_without_rows_counts_too(s3, place, finished, tmp_path):
    export_run(finished, place)
    path, _ = fetch_run(place.below("done"), tmp_path / "b")
    with RunDir.resume(path) as run:
        run._earlier_seconds += 60
    export_run(path, place)
    with pytest.raises(RlvrError, match="it was worked on for longer"):
        export_run(finished, place)


# Faults


@pytest.mark.parametrize("kind", ["500", "503", "cut", "lost", "short", "slow"])
def test_faults_of_the_store_cost_nothing_but_time(s3, place, finished, tmp_path, kind):
    requests = [("PUT", "rollouts/"), ("PUT", "run."), ("GET", "manifest."), ("PUT", INDEX), ("GET", "metrics.")]
    s3.faults += [Fault(*request, kind) for request in requests if (kind == "short") <= (request[0] == "GET")]
    export_run(finished, place)
    s3.faults += [Fault("GET", path, kind) for path in ("index", "rollouts/", "run.")]
    path, _ = fetch_run(place.below("done"), tmp_path / "b")
    assert s3.faults == []
    assert files(path) == files(finished)


def test_a_large_file_comes_in_ranges_each_with_its_own_time(s3, place, finished, tmp_path, monkeypatch):
    """A request for bytes may take longer than any other: as long as a slow line needs for a range of a file, or a part."""
    monkeypatch.setattr(storing, "RANGE_BYTES", 2**16)
    monkeypatch.setattr(storing, "ANSWERS", storing.timedelta(seconds=SLOW / 2))
    (finished / "model").mkdir()
    (finished / "model" / "big.safetensors").write_bytes(os.urandom(5 * 2**15))
    (finished / "model" / "empty.txt").touch()
    s3.faults += [Fault("PUT", "big", "slow"), *(Fault("GET", "big", kind) for kind in ("slow", "503", "short", "cut"))]
    export_run(finished, place)
    assert s3.faults == []
    s3.requests.clear()
    path, _ = fetch_run(place.below("done"), tmp_path / "b")
    assert files(path) == files(finished)
    assert len([r for r in s3.requests if "big" in r]) == 3


def test_a_store_that_stays_broken_leaves_the_earlier_copy(s3, place, finished, tmp_path, monkeypatch):
    monkeypatch.setitem(storing.RETRY, "max_retries", 1)
    export_run(finished, place)
    before = files(finished)
    longer(finished)
    s3.faults += [Fault("PUT", "metrics.", "503")] * 2
    with pytest.raises(RlvrError, match=r"Cannot write s3://bucket/.*/done/metrics\..*: the store answers 503.*Told"):
        export_run(finished, place)
    assert files(fetch_run(place.below("done"), tmp_path / "b")[0]) == before
    assert export_run(finished, place).moved < 4
    assert files(fetch_run(place.below("done"), tmp_path / "c")[0]) == files(finished)


def test_what_did_not_arrive_as_it_was_sent_is_noticed(s3, place, finished, tmp_path):
    s3.faults.append(Fault("PUT", "rollouts/", "flip"))
    with pytest.raises(RlvrError, match="did not arrive as it was sent"):
        export_run(finished, place)
    assert INDEX not in " ".join(stored(place))
    assert export_run(finished, place).moved >= 1
    assert files(fetch_run(place.below("done"), tmp_path / "b")[0]) == files(finished)


def test_a_damaged_copy_is_not_fetched(s3, place, finished, tmp_path):
    export_run(finished, place)
    store = Store(place.below("done"))
    key = next(key for key in store.sizes() if key.startswith("rollouts/"))
    data, tag = read(store, key)
    store.put(key, data[:-1] + b"?", replaces=tag)
    with pytest.raises(RlvrError, match="is damaged: its sha256 is not the one in the copy's index"):
        fetch_run(place.below("done"), tmp_path / "b")
    assert not (tmp_path / "b" / "done").exists()
    store.delete([key])
    with pytest.raises(RlvrError, match="there is no such object"):
        fetch_run(place.below("done"), tmp_path / "b")


def test_the_second_of_two_writers_is_refused(s3, place, finished, tmp_path):
    """Another copy's index is put between the first one's files and its index."""
    other = shutil.copytree(finished, tmp_path / "b" / "done")
    longer(other)

    def meanwhile(request: str) -> None:
        if request.startswith("PUT") and INDEX in request:
            s3.before = lambda request: None
            export_run(other, place)

    s3.before = meanwhile
    with pytest.raises(Changed, match="was written by another process meanwhile"):
        export_run(finished, place)
    assert files(fetch_run(place.below("done"), tmp_path / "c")[0]) == files(other)


def test_a_run_that_goes_on_while_it_is_fetched_comes_as_it_is_then(s3, place, finished, tmp_path):
    export_run(finished, place)
    longer(finished)

    def meanwhile(request: str) -> None:
        if request.startswith("GET") and "manifest" in request:
            s3.before = lambda request: None
            export_run(finished, place)

    s3.before = meanwhile
    assert files(fetch_run(place.below("done"), tmp_path / "c")[0]) == files(finished)


@pytest.mark.parametrize("point", ["upload:1", "upload:4", "upload.index:1", "upload.done:1"])
def test_a_killed_export_goes_on(s3, place, finished, tmp_path, forks, point):
    export_run(finished, place)
    before = files(finished)
    longer(finished)
    command = ("export", finished, "--to", place)
    forks.run(*command, cwd=tmp_path, environment=variables(s3), fault=point, status=-signal.SIGKILL)
    seen = files(fetch_run(place.below("done"), tmp_path / "b")[0])
    assert seen == (files(finished) if point == "upload.done:1" else before)
    done = forks.run(*command, cwd=tmp_path, environment=variables(s3))
    assert files(fetch_run(place.below("done"), tmp_path / "c")[0]) == files(finished)
    if point.startswith("upload."):
        assert "0 of them sent" in done.err


@pytest.mark.parametrize("point", ["fetch:1", "fetch:4", "fetch.rename:1"])
def test_a_killed_fetch_goes_on(s3, place, finished, tmp_path, forks, point):
    export_run(finished, place)
    command = ("fetch", f"{place}/done", "--runs-dir", tmp_path / "b")
    forks.run(*command, cwd=tmp_path, environment=variables(s3), fault=point, status=-signal.SIGKILL)
    assert not (tmp_path / "b" / "done").exists()
    done = forks.run(*command, cwd=tmp_path, environment=variables(s3))
    assert files(tmp_path / "b" / "done") == files(finished)
    if point == "fetch.rename:1":
        assert "0 of them fetched" in done.err


@pytest.mark.slow
def test_an_interrupted_run_is_resumed_elsewhere(s3, place, tmp_path, forks):
    """Killed in the middle, exported, fetched into an empty folder, resumed: the bytes of the run that nothing disturbed."""
    for name in ("whole", "first", "second"):
        (tmp_path / name).mkdir()
    go_on(forks, tmp_path / "whole" / "runs" / "r", GRPO)
    run = tmp_path / "first" / "runs" / "r"
    go_on(forks, run, GRPO, fault="update:4", status=-signal.SIGKILL)
    forks.run("export", "r", "--to", place, cwd=run.parents[1], environment=variables(s3))
    other = tmp_path / "second" / "runs" / "r"
    forks.run("fetch", f"{place}/r", cwd=other.parents[1], environment=variables(s3))
    run.rename(tmp_path / "lost")
    go_on(forks, other, GRPO)
    assert_ended_as(tmp_path / "whole" / "runs" / "r", other)
    forks.run("export", "r", "--to", place, cwd=other.parents[1], environment=variables(s3))


def test_runs_are_fetched_into_a_directory_also_where_the_environment_names_a_store(
    s3, place, finished, tmp_path, monkeypatch
):
    export_run(finished, place)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(RlvrError, match=f"{place} is no directory of this machine") as raised:
        invoke(["fetch", f"{place}/done", "--runs-dir", str(place)])
    assert "--runs-dir DIRECTORY" in raised.value.hint
    monkeypatch.setenv("RLVR_RUNS_DIR", f"{place}/")
    invoke(["fetch", f"{place}/done"])
    assert files(tmp_path / "elsewhere" / "runs" / "done") == files(finished)


# Bad input, and secrets


@pytest.mark.parametrize(
    "text",
    ["s3://", "s3:///x", "s3://b", "s3://Bucket/x", "s3://bucket/a//b", "s3://bucket/../x", "s3://bucket/x?y", "s3://bucket/a b"],
)  # fmt: skip
def test_what_is_no_address_is_refused(text):
    with pytest.raises(RlvrError, match="is not an address in object storage"):
        parsed_address(text)


def test_bad_input_is_an_error(s3, place, finished, tmp_path, monkeypatch):
    with pytest.raises(RlvrError, match=rf"There is no run at {place}/none"):
        invoke(["fetch", f"{place}/none"])
    with pytest.raises(RlvrError, match="there is no such bucket"):
        invoke(["fetch", "s3://no-such-bucket/runs/r"])
    with pytest.raises(RlvrError, match="Nothing says what to fetch"):
        invoke(["fetch"])
    with RunDir.resume(finished), pytest.raises(RlvrError, match="is being written by process"):
        invoke(["export", str(finished), "--to", str(place)])
    (finished / "link").symlink_to("run.json")
    with pytest.raises(RlvrError, match="link is a symbolic link"):
        invoke(["export", str(finished), "--to", str(place)])
    (finished / "link").unlink()
    part = next((finished / "rollouts").iterdir())
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(RlvrError, match="is damaged: it is missing, or its sha256 differs from the manifest"):
        invoke(["export", str(finished), "--to", str(place)])
    assert stored(place.below("done")) == {}
    monkeypatch.setattr(storing, "find_spec", lambda name: None)
    with pytest.raises(RlvrError, match="obstore is not installed") as raised:
        invoke(["export", str(finished), "--to", str(place)])
    assert "pip install -e '.[storage]'" in raised.value.hint


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", ".lock", "a//b", "a/.x.tmp", ""])
def test_an_index_cannot_lead_out_of_the_run(path):
    record = {
        "format": 1,
        "run_id": "r",
        "created_at": "",
        "wall_seconds": 0,
        "files": {path: {"bytes": 1, "sha256": "0" * 64}},
    }
    with pytest.raises(RlvrError, match="is damaged: it names a file"):
        parsed_index(json.dumps(record).encode(), where="index.json")
    for data in (b"", b"[]", b"{}", json.dumps(record | {"files": []}).encode()):
        with pytest.raises(RlvrError, match="is not the index of a run"):
            parsed_index(data, where="index.json")
    with pytest.raises(RlvrError, match="has format 2"):
        parsed_index(json.dumps(record | {"format": 2}).encode(), where="index.json")


@pytest.mark.parametrize(
    ("text", "why", "todo"),
    [
        ("redirect without LOCATION, this normally indicates an incorrectly configured region", "another region", "Set AWS_REGION to"),
        ("status code: 301 Moved: <Code>PermanentRedirect</Code>", "another region", "Set AWS_REGION to"),
        ("status code: 400 Bad Request: <Code>AuthorizationHeaderMalformed</Code>", "another region", "Set AWS_REGION to"),
        ("status code: 400 Bad Request: <Code>ExpiredToken</Code>", "refused (400 Bad Request ExpiredToken)", "AWS_SESSION_TOKEN"),
        ("status code: 400 Bad Request: <Code>InvalidToken</Code>", "refused (400 Bad Request InvalidToken)", "AWS_SESSION_TOKEN"),
    ],
)  # fmt: skip
def test_an_error_says_what_the_store_means(text, why, todo):
    said, hint = storing._reason(text, missing=False)
    assert why in said
    assert todo in hint


def test_secrets_are_sent_nowhere_and_written_nowhere(s3, place, finished, tmp_path, forks):
    """Not in what is uploaded, in a run, in what commands say when they work and when they fail, nor in a traceback."""

    def call(*command, status=0, **environment):
        return forks.run(*command, cwd=tmp_path, environment=variables(s3) | environment, status=status).said

    export = ("export", finished, "--to", place)
    said = [call(*export), call("fetch", f"{place}/done"), call("fetch", f"{place}/none", status=1)]
    s3.faults += [Fault("GET", "index", "403"), Fault("GET", "index", "400")]
    said += [call(*export, status=1), call(*export, status=1)]
    said.append(
        call(
            *export, status=1, AWS_ENDPOINT_URL="http://" + "@".join([SECRETS["AWS_SECRET_ACCESS_KEY"], "127.0.0.1:1"])
        )
    )
    said.append(call("export", finished, "--to", f"s3://me:{SECRETS['AWS_SECRET_ACCESS_KEY']}@bucket/x", status=1))
    assert "it is refused (403" in said[3]
    assert "answers 400" in said[4]
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in (SECRETS["AWS_SECRET_ACCESS_KEY"], "seen"):
        assert secret not in "".join(said)
        assert secret.encode() not in written + bytes(s3.heard)
    assert SECRETS["AWS_ACCESS_KEY_ID"] not in "".join(said)
    assert SECRETS["AWS_ACCESS_KEY_ID"].encode() not in written
