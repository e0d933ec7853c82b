"""Run rlvr many times, each in a fork of this process, which has imported everything: the way to see thousands of ends.

    python many_ends.py '[["check", "RUN"], ...]' COUNT

Enters: command lines, used in turn, and how many ends to see; two run at a time. Leaves: on stdout the exit statuses as
JSON, status -> count; on stderr what processes with another status than 0 wrote there. A child's interpreter ends as any
other does: atexit functions, modules and threads included.
"""

import collections
import importlib
import json
import os
import sys
import tempfile

import torch

from rlvr_cli.cli import main

JOBS = 2
SHARED = ("duckdb", "matplotlib.figure", "pyarrow.parquet", "transformers")  # imported once, for all children


def parent(commands: list[list[str]], count: int) -> list[str] | None:
    """Return the command line of a child, in the child; in the parent None, after all children have ended."""
    statuses: collections.Counter[int] = collections.Counter()
    running: dict[int, str] = {}
    for number in range(count + JOBS):
        if len(running) == JOBS or number >= count:
            if not running:
                break
            pid, status = os.wait()
            code = os.waitstatus_to_exitcode(status)
            statuses[code] += 1
            log = running.pop(pid)
            with open(log, errors="replace") as file:
                if code:
                    sys.stderr.write(file.read())
            os.unlink(log)
        if number < count:
            descriptor, log = tempfile.mkstemp()
            pid = os.fork()
            if pid == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(descriptor, 2)
                return [word.replace("NUMBER", str(number)) for word in commands[number % len(commands)]]
            os.close(descriptor)
            running[pid] = log
    print(json.dumps(statuses))
    return None


torch.set_num_threads(1)
for module in SHARED:
    importlib.import_module(module)
arguments = parent(json.loads(sys.argv[1]), int(sys.argv[2]))
if arguments is not None:
    sys.argv = ["rlvr", *arguments]
    main()
