"""What a worker does in the tests of `rlvr_cli.parallel`."""

import gc
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection

from rlvr_cli.faults import fault_point
from rlvr_cli.parallel.worker import read, write


def answer(connection: Connection, *, greeting: str, descriptor: int = -1) -> None:
    """Greet, then answer each message with what the process has, until it is told to end with a status."""
    write(connection, [greeting, os.getpid()])
    while not isinstance(message := read(connection), int):
        fault_point(message)
        found = {"environment": os.environ.get(message)}
        if message == "file":
            found["file"] = os.pread(descriptor, 100, 0).decode()
        if message == "busy":  # it does not see that nobody is there any more
            time.sleep(600)
        if message == "slow":
            time.sleep(0.2)
        if message == "never collected":
            found["objects"] = gc.get_freeze_count()
        if message == "child":
            found["child"] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
        write(connection, found)
    sys.exit(message)
