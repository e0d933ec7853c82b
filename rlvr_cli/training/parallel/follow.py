"""A trainer that follows rank 0: how it is started, and what it does.

Enters: its rank, and where rank 0 listens. Leaves: a `Worker` that has joined the ranks, and calls the methods that rank 0 calls.
"""

import sys
from contextlib import closing, suppress
from multiprocessing.connection import Connection

import torch

from rlvr_cli.errors import RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.models.compute.device import out_of_memory_as_user_error
from rlvr_cli.parallel.places import device_of
from rlvr_cli.parallel.start import start_worker
from rlvr_cli.parallel.worker import Worker
from rlvr_cli.terminal import console
from rlvr_cli.training.parallel.ranks import (
    ALONE,
    ENDED,
    LOOPBACK,
    Elsewhere,
    RankLost,
    alive,
    announce,
    connect,
    join,
    losses_within,
)
from rlvr_cli.training.parallel.sharded_replica import open_replica


def start_trainer(rank: int, *, size: int, address: str, place: str) -> Worker:
    """Start a trainer.

    Args:
        size: how many trainers there are.
        address: where rank 0 listens, HOST:PORT.
        place: of the trainer: a device of this machine, or a place on a cluster.
    """
    return start_worker(
        f"trainer{rank}",
        "rlvr_cli.training.parallel.follow:follow",
        place=place,
        arguments={"rank": rank, "size": size, "address": address, "device": device_of(place)},
        title=f"Trainer {rank}",
        hint="Its own messages are above. Status -9 usually means that memory ran out. What was committed is kept: "
        "resume with --resume, also with another number of --trainers.",
    )


def follow(_: Connection, *, rank: int, size: int, address: str, device: str) -> None:
    """Join the ranks, and do what rank 0 does, until it has ended. The arguments are those of `start_trainer`."""
    method, ranks = "connecting", ALONE
    try:
        with losses_within():
            store = connect(address)
            announce(store, rank)
        fault_point("announced")
        with alive(address, rank):
            ranks = join(
                store, rank=rank, size=size, device=torch.device(device), loopback=address.startswith(LOOPBACK)
            )
            method = ""
            fault_point("joined")
            with closing(open_replica(ranks.broadcast(), device=device, ranks=ranks)) as replica:
                while (call := ranks.broadcast()) is not None:
                    method, arguments, options = call
                    with out_of_memory_as_user_error(), suppress(Elsewhere):
                        getattr(replica, method)(*arguments, **options)
                    method = ""
    except RankLost as error:
        with suppress(RuntimeError):  # of rank 0's store, which may have ended, too
            method = "" if ranks.posted(ENDED) else method
        if method:  # rank 0 has ended if it tells nothing, and says why
            why = str(error) if method == "connecting" else str(error).splitlines()[0]
            console.say(f"trainer {rank} lost the others in {method}: {why}")
        sys.exit(1)
    except RlvrError as error:
        console.say(f"error: trainer {rank}: {error.problem}")
        console.say(f"  {error.hint}")
        sys.exit(1)
