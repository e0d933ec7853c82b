"""A run of a sweep, in the process of a `parallel.worker.Worker`: on this machine, or on a node of a cluster.

Enters: the words of its command. Leaves: the run directory, a log, and the command's exit status.
"""

import os
import runpy
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from rlvr_cli.process import STOP_SIGNALS, die_with_parent

STOPPED = 130  # the status of a run that is asked to end before its command begins


def run(connection: Connection, *, words: Sequence[str], log: str, folder: str, visible: str) -> None:
    """Be the command from here on. It is ended by SIGTERM, also when its parent dies, so that it saves what is done.

    Args:
        connection: is kept open until the process ends. The only message is `STOPPED`, beside a SIGTERM, which is lost if the process has
            just begun.
        words: of the command: grpo, and its options.
        log: the file to which all that it says is added.
        folder: in which it runs.
        visible: the value of CUDA_VISIBLE_DEVICES; empty: as it is.
    """
    os.chdir(folder)
    with open(log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if connection.poll(0):  # after the signals: one that comes later is heard
        sys.exit(STOPPED)
    die_with_parent(os.getppid(), by=signal.SIGTERM)
    sys.argv = ["rlvr", *words]
    runpy.run_module("rlvr_cli", run_name="__main__", alter_sys=True)
