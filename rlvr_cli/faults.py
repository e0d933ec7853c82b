"""Fault injection: kill the process or raise an error at a named point, so that recovery tests are deterministic.

Enters: the environment variable ``RLVR_FAULT=point:n[:action]``. Leaves: nothing, unless this is the n-th time (from 1)
that the process passes `point`; then the action happens: the signal ``kill`` (the default), ``term``, ``int``, ``hup``, ``usr1``
or ``stop``, or ``enospc`` (OSError, as from a full disk). Without the variable a point costs one dictionary look-up.
"""

import errno
import os
import signal

VARIABLE = "RLVR_FAULT"
SIGNALS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    "hup": signal.SIGHUP,
    "usr1": signal.SIGUSR1,
    "stop": signal.SIGSTOP,
}
ACTIONS = (*SIGNALS, "enospc")

_passed: dict[
    str, int
] = {}  # specification -> number of times its point was passed; cleared when the variable is unset


def fault_point(name: str) -> None:
    """Mark a point at which ``RLVR_FAULT`` can kill the process or raise an error.

    Raises:
        OSError: with errno ENOSPC, when ``RLVR_FAULT`` asks for it here.
        ValueError: ``RLVR_FAULT`` cannot be read.
    """
    specification = os.environ.get(VARIABLE)
    if specification is None:
        _passed.clear()
        return
    point, count, action = _parse(specification)
    if point != name:
        return
    _passed[specification] = _passed.get(specification, 0) + 1
    if _passed[specification] != count:
        return
    if action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.kill(os.getpid(), SIGNALS[action])


def environment_of(child: str) -> dict[str, str]:
    """Return the environment for a child process, in which only points of the name `CHILD.point` take effect, as `point`."""
    environment = dict(os.environ)
    specification = environment.pop(VARIABLE, "")
    if specification.startswith(f"{child}."):
        environment[VARIABLE] = specification.removeprefix(f"{child}.")
    return environment


def _parse(specification: str) -> tuple[str, int, str]:
    point, _, rest = specification.partition(":")
    count, _, action = rest.partition(":")
    action = action or "kill"
    if not point or not count.isdecimal() or int(count) < 1 or action not in ACTIONS:
        raise ValueError(f"{VARIABLE}={specification}: write point:n[:action], with one of the actions {ACTIONS}")
    return point, int(count), action
