"""The first signal requests a stop, the second stops at once, and the old handlers are restored."""

import os
import signal
import threading

import pytest

from rlvr_cli.errors import Interrupted
from rlvr_cli.process import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_raised_at_the_next_check_and_the_second_at_once(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        stop.check()
        os.kill(os.getpid(), number)
        assert stop.requested
        with pytest.raises(Interrupted):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_no_stop_is_requested():
    seen = []

    def work():
        with StopRequest() as stop:
            stop.check()
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
