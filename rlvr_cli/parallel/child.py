"""The process of a `worker.LocalWorker`, which starts it: `python -m rlvr_cli.parallel.child MODULE:FUNCTION CONNECTION PARENT`.

What takes long to import is imported last: before that, the process sees to it that it dies with its parent.
"""

import signal
import sys

from rlvr_cli.process import STOP_SIGNALS, die_with_parent, importing


def main(entry: str, connection: int, *, parent: int) -> None:
    """Call the function that the parent names, with the connection and the arguments that come first through it.

    Args:
        entry: the function, as `module:function`.
        connection: the descriptor of the connection to the parent.
        parent: the parent's process id.
    """
    for number in STOP_SIGNALS:  # the parent handles them
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)

    from multiprocessing.connection import Connection
    from pkgutil import resolve_name

    from rlvr_cli.parallel.worker import read

    here = Connection(connection)
    arguments = read(here)
    with importing():
        function = resolve_name(entry)
    function(here, **arguments)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), parent=int(sys.argv[3]))
