"""Grading stored responses in batches: a stop does not wait for a grader that hangs, and loses nothing that is done."""

import threading
from concurrent.futures import Future

import pytest

from rlvr_cli.errors import Interrupted
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.regrade import GRADE_ROWS, graded_batches


def test_a_stop_yields_the_batches_that_are_done_and_gives_up_those_under_way():
    stop, made = StopRequest(), []

    def submit(batch):
        made.append(Future())
        if len(made) == 2:
            made[1].set_result([f"grade of {row}" for row in batch])
        if len(made) == 3:
            made[2].set_exception(ValueError("a grader's own"))
            threading.Timer(0.05, setattr, (stop, "requested", True)).start()  # while the first batch hangs
        return made[-1]

    rows, yielded = range(2 * GRADE_ROWS + 1), []
    with pytest.raises(Interrupted):
        yielded.extend((list(batch), grades) for batch, grades in graded_batches(rows, submit, stop=stop))
    second = list(rows[GRADE_ROWS : 2 * GRADE_ROWS])
    assert yielded == [(second, [f"grade of {row}" for row in second])]
    assert made[0].cancelled()
