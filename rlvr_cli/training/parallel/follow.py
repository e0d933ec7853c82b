"""A trainer that follows rank 0: `python -m rlvr_cli.training.parallel.follow`, which `start` starts.

What takes long to import is imported in a function: before that, `main` sees to it that the process dies with its parent.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import rlvr_cli
from rlvr_cli.faults import environment_of
from rlvr_cli.process import STOP_SIGNALS, die_with_parent


def start(rank: int, *, size: int, address: str, device: str) -> "subprocess.Popen[bytes]":
    """Start a trainer on this machine, in a session of its own, so that it gets no Ctrl-C.

    Args:
        size: how many trainers there are.
        address: where rank 0 listens, HOST:PORT.
        device: of the trainer.
    """
    root = str(Path(rlvr_cli.__file__).parents[1])
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "rlvr_cli.training.parallel.follow"),
            *map(str, (rank, size, address, device, os.getpid())),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # stdout is for results
        env=environment_of(f"trainer{rank}") | path,
        start_new_session=True,
    )


def end(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    """Kill these trainers, if they have not ended."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(rank: int, size: int, address: str, device: str, parent: int) -> None:
    """Join the ranks, and do what rank 0 does, until it has ended.

    Args:
        address: where rank 0 listens, HOST:PORT.
        device: of this trainer.
        parent: the parent's process id.
    """
    for number in STOP_SIGNALS:  # rank 0 handles them
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)

    import torch

    from rlvr_cli.errors import RlvrError
    from rlvr_cli.faults import fault_point
    from rlvr_cli.models.compute.device import out_of_memory_as_user_error
    from rlvr_cli.terminal import console
    from rlvr_cli.training.parallel.ranks import LOOPBACK, Elsewhere, RankLost, alive, announce, connect, join
    from rlvr_cli.training.parallel.trainers import open_replica

    method = ""
    try:
        store = connect(address)
        announce(store, rank)
        fault_point("announced")
        with alive(address, rank):
            ranks = join(
                store, rank=rank, size=size, device=torch.device(device), loopback=address.startswith(LOOPBACK)
            )
            fault_point("joined")
            replica = open_replica(ranks.broadcast(), device=device, ranks=ranks)
            while (call := ranks.broadcast()) is not None:
                method, arguments, options = call
                with out_of_memory_as_user_error(), suppress(Elsewhere):
                    getattr(replica, method)(*arguments, **options)
                method = ""
    except RankLost as error:
        if method:  # rank 0 has ended if it tells nothing, and says why
            console.say(f"trainer {rank} lost the others in {method}: {str(error).splitlines()[0]}")
        sys.exit(1)
    except RlvrError as error:
        console.say(f"error: trainer {rank}: {error.problem}")
        console.say(f"  {error.hint}")
        sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
