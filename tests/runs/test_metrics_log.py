"""Metrics of training wait to be committed together."""

from rlvr_cli.runs.metrics_log import MetricsLog
from rlvr_cli.runs.run_dir import RunDir


def committed(run: RunDir) -> list[int]:
    return [step for _, step, _ in run.metrics_before(10)]


def test_after_a_commit_the_next_metrics_wait_many_times_as_long_as_it_took(run: RunDir):
    log = MetricsLog(run, seconds=0)
    log.add(1, {"loss": 1.0})
    assert committed(run) == [1]
    log.add(2, {"loss": 2.0})
    log.add(3, {"loss": 3.0})
    assert committed(run) == [1]
    while committed(run) == [1]:
        log.add(4, {"loss": 4.0})
    assert committed(run) == [1, 2, 3, 4]
    log.add(5, {"loss": 5.0})
    log.flush()
    assert committed(run) == [1, 2, 3, 4, 5]
