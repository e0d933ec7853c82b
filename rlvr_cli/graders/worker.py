"""A grading process: `python -m rlvr_cli.graders.worker`, started by `pool.GraderPool` and by nothing else.

Enters, on standard input: one JSON line with the grader and its settings, then one JSON line per batch: its token and its
items, each [index, response, truth] or, if the grader takes the example, [index, response, truth, example]. Leaves, on
standard output: one JSON line that says whether it does, or why the grader could not be loaded; then one JSON line per
item: the token, the index and the verdict, which is the fields of its `Grade`, or the name and the text of the exception that
the grader raised, or null if it must be graded again by a new process. JSON, never pickle: a worker cannot make its parent
run anything.

The process that is started only guards the one that grades, see `process.fork_guarded`. The grader sees empty standard
streams and a cleaned environment (`pool.environment`). A copy of the process that it forks has no pipes, and ends when
the grader returns in it.
"""

import json
import os
import resource
import signal
import sys
from dataclasses import astuple
from typing import IO, Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.process import fork_guarded, limit_memory, memory_was_filled
from rlvr_cli.types import KEPT_CHARACTERS


def main() -> None:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    requests, replies = _take_over_streams()
    setup = json.loads(requests.readline() or b"{}")
    if not setup:
        return
    fork_guarded(setup["parent"])
    limit_memory(int(setup["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipes = (requests.fileno(), replies.fileno())
    os.register_at_fork(after_in_child=lambda: [os.close(pipe) for pipe in pipes])
    sys.path[:0] = [entry for entry in setup["path"] if entry not in sys.path]
    from rlvr_cli.graders import resolve_grader
    from rlvr_cli.graders.custom import error_detail, wants_example

    try:
        grade = resolve_grader(setup["spec"], format_rule=setup["format_rule"], timeout=setup["timeout"])
    except RlvrError as error:
        _reply(replies, {"token": setup["token"], "problem": error.problem, "hint": error.hint})
        return
    _reply(replies, {"token": setup["token"], "wants_example": wants_example(grade)})
    process, graded = os.getpid(), 0
    for line in requests:
        token, items = json.loads(line)
        for index, *item in items:
            is_filled = False
            try:
                verdict: Any = astuple(grade(*item))[:7]  # no judgement
            except BaseException as error:  # whatever a grader raises becomes the error of this item
                verdict = [type(error).__name__[:KEPT_CHARACTERS], ""]
                try:
                    verdict[1] = error_detail(error, setup["spec"], grade)[:KEPT_CHARACTERS]
                except BaseException:  # the text of an exception may be the grader's own code
                    verdict[1] = "the text of the exception cannot be read"
                is_filled = memory_was_filled(error)
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that is left would go off in a later item
            if os.getpid() != process:  # the grader forked and returned in the copy, too
                os._exit(0)
            if is_filled and graded:
                verdict = None  # earlier items have filled the memory
            _reply(replies, [token, index, verdict])
            graded += 1


def _take_over_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Move the two pipes to new file descriptors, which no print reaches, and empty the standard streams."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
    return requests, replies


def _reply(stream: IO[bytes], message: Any) -> None:
    stream.write(
        b"\n" + json.dumps(message).encode() + b"\n"
    )  # a line of its own, whatever else is written to the pipe
    stream.flush()


if __name__ == "__main__":
    main()
