"""A grading process: `python -m rlvr_cli.graders.worker`, started by `pool.GraderPool` and by nothing else.

Enters, on standard input: one JSON line with the grader and its settings, then one JSON line per batch: a list of
[response, truth], or of [response, truth, example] if the grader takes the example. Leaves, on standard output: one
JSON line that says whether it does, or why the grader could not be loaded; then one JSON line per item: the fields of
its `Grade`, or the name of the exception that the grader raised. The grader itself sees empty standard streams. JSON,
never pickle: a worker cannot make its parent run anything.
"""

import json
import os
import resource
import signal
import sys
from dataclasses import astuple
from typing import IO, Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.process import die_with_parent


def main() -> None:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    requests, replies = _take_over_streams()
    setup = json.loads(requests.readline() or b"{}")
    if not setup:
        return
    die_with_parent(setup["parent"])
    limit, hard = int(setup["memory_bytes"]), resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path[:0] = [entry for entry in setup["path"] if entry not in sys.path]
    from rlvr_cli.graders import resolve_grader
    from rlvr_cli.graders.custom import wants_example

    try:
        grade = resolve_grader(setup["spec"], format_rule=setup["format_rule"])
    except RlvrError as error:
        _reply(replies, {"problem": error.problem, "hint": error.hint})
        return
    _reply(replies, {"wants_example": wants_example(grade)})
    for line in requests:
        for item in json.loads(line):
            try:
                verdict: Any = astuple(grade(*item))
            except BaseException as error:  # whatever a grader raises becomes the error of this item
                verdict = type(error).__name__
            _reply(replies, verdict)


def _take_over_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Move the two pipes to new file descriptors, which no print reaches, and empty the standard streams."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
    return requests, replies


def _reply(stream: IO[bytes], message: Any) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main()
