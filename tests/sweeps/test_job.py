"""The process of a run of a sweep: that it ends when it is asked to, also where it has just begun."""

import threading
from pathlib import Path

import working
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.parallel.start import start_worker
from rlvr_cli.parallel.worker import LocalWorker
from rlvr_cli.sweeps.job import STOPPED
from rlvr_cli.sweeps.schedule import Job, _Running, _Sweep
from rlvr_cli.sweeps.slots import Slot


def test_one_that_is_asked_to_end_before_it_hears_signals_does_not_begin(tmp_path):
    arguments = {"words": ["--version"], "log": str(tmp_path / "log"), "folder": str(tmp_path), "visible": ""}
    worker = start_worker("x", "rlvr_cli.sweeps.job:run", place="cpu", arguments=arguments, title="It", hint="")
    assert isinstance(worker, LocalWorker)
    worker.send(STOPPED)
    assert worker.wait() == STOPPED
    worker.kill()
    assert (tmp_path / "log").read_text() == ""


def test_a_sweep_that_ends_does_not_wait_for_one_that_hears_no_signal(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(working.__file__).parent))
    worker = LocalWorker("x", "working:answer", arguments={"greeting": ""}, title="It", hint="")
    worker.receive()  # from here on it ignores signals, and ends with the status that it is sent
    sweep = _Sweep([], tmp_path, [], ended=lambda name: None, looked_up=lambda job: job)
    sweep.running.append(_Running(1, Job("x", [], GrpoConfig(dataset="arithmetic:4")), Slot(), worker, 0.0))
    late = threading.Timer(10, worker.kill)
    late.start()
    sweep.end()
    late.cancel()
    assert worker.status == STOPPED
    worker.kill()
