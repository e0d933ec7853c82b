"""Where workers are started: what there is for them."""

from rlvr_cli.parallel.start import cores_of


def test_of_this_machine_the_cores_count_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5})
    assert cores_of("cpu") == 2
