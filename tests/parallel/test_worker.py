"""A worker: it is called, watched and killed; it leaves nothing behind, and its end is told in words."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import working
from living import gone_within
from rlvr_cli.config.parsing.options import LONGEST
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.parallel.worker import LocalWorker
from rlvr_cli.process import STOP_SIGNALS, StopRequest

HELPERS = Path(working.__file__).parent


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HELPERS))
    started = []

    def start(name="worker", **given) -> LocalWorker:
        how = {"arguments": {"greeting": "hello"}, "title": "The worker", "hint": "Look at it."} | given
        started.append(LocalWorker(name, "working:answer", **how))
        assert started[-1].receive() == ["hello", started[-1].pid]
        return started[-1]

    yield start
    for worker in started:
        worker.kill()
        worker.kill()


def test_it_answers_until_it_ends_which_is_told_with_its_status(start):
    worker = start()
    for name in ("PATH", "no such variable"):
        worker.send(name)
        assert worker.receive() == {"environment": os.environ.get(name)}
    assert worker.status is None
    worker.check()
    worker.send(3)
    for call in (worker.receive, worker.check, lambda: worker.send("PATH")):
        with pytest.raises(RlvrError) as error:
            call()
        assert (error.value.problem, error.value.hint) == ("The worker ended with status 3.", "Look at it.")
    assert worker.status == 3


def test_it_has_its_own_device_threads_faults_and_files(start, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setenv("RLVR_FAULT", "second.RLVR_FAULT:9")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with tempfile.TemporaryFile() as file:
        file.write(b"shared")
        file.flush()
        arguments = {"greeting": "hello", "descriptor": file.fileno()}
        first = start("first", device="cuda:1", threads=3)
        second = start("second", arguments=arguments, descriptors=[file.fileno()], device="cpu")
        for worker, name, value in (
            (first, "CUDA_VISIBLE_DEVICES", "7"), (first, "OMP_NUM_THREADS", "3"), (first, "RLVR_FAULT", None),
            (second, "CUDA_VISIBLE_DEVICES", "5,7"), (second, "OMP_NUM_THREADS", None), (second, "RLVR_FAULT", "RLVR_FAULT:9"),
        ):  # fmt: skip
            worker.send(name)
            assert worker.receive() == {"environment": value}, name
        second.send("file")
        assert second.receive()["file"] == "shared"


def test_it_ends_with_its_children_when_it_is_killed(start):
    worker = start()
    worker.send("child")
    child = worker.receive()["child"]
    worker.kill()
    assert worker.status == -signal.SIGKILL
    assert gone_within(child, 10)


def test_signals_to_stop_are_its_parents(start):
    worker = start()
    for number in STOP_SIGNALS:
        os.kill(worker.pid, number)
    worker.send("PATH")
    assert worker.receive() == {"environment": os.environ["PATH"]}
    with StopRequest():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted):
            worker.receive()


def test_a_long_wait_looks_again_and_a_short_one_ends(start, monkeypatch):
    worker = start()
    with pytest.raises(TimeoutError):
        worker.receive(within=0.01)
    monkeypatch.setattr("rlvr_cli.parallel.worker.LONGEST_WAIT", 0.01)
    worker.send("slow")
    assert worker.receive(within=LONGEST) == {"environment": None}
    with pytest.raises(TimeoutError):
        worker.receive(within=0.01)


def test_what_it_imports_is_never_collected(start):
    worker = start()
    worker.send("never collected")
    assert worker.receive()["objects"] > 1000


def test_it_dies_with_its_parent(tmp_path):
    code = (
        "import sys, time\nfrom rlvr_cli.parallel.worker import LocalWorker\n"
        "worker = LocalWorker('worker', 'working:answer', arguments={'greeting': ''}, title='', hint='')\n"
        "pid = worker.receive()[1]\nworker.send('busy')\nprint(pid, flush=True)\ntime.sleep(600)"
    )
    path = os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        worker = int(parent.stdout.readline())
    assert Path(f"/proc/{worker}").exists()
    parent.kill()
    parent.wait()
    assert gone_within(worker, 10)
