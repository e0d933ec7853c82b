"""Several machines: the same command on each. The first one has the run; the others lend it their trainers.

Enters: --nodes, --rendezvous, --node-rank and --trainers. Leaves, on another machine than the first: an exit when the run has
ended. The machines need a network of their own: whoever reaches the rendezvous' port can run code here.
"""

import os
import socket
import time
from contextlib import suppress

from rlvr_cli.config.shared.training import TrainingConfig
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.models.compute.device import cuda_devices
from rlvr_cli.parallel.worker import Worker
from rlvr_cli.process import StopRequest
from rlvr_cli.terminal import console
from rlvr_cli.training.parallel.follow import start_trainer
from rlvr_cli.training.parallel.placement import place

SLURM_RANK = "SLURM_NODEID"


def node_rank(config: TrainingConfig) -> int:
    """Return this machine's number: --node-rank, else Slurm's, else 0 where the rendezvous' host is this machine.

    Raises:
        RlvrError: it is not clear which one of several others this is.
    """
    if config.nodes == 1:
        return 0
    slurm = os.environ.get(SLURM_RANK, "")
    found = config.node_rank if config.node_rank is not None else int(slurm) if slurm.isdecimal() else None
    if found is None:
        found = 0 if _is_here(rendezvous(config)[0]) else 1
        if found and config.nodes > 2:
            raise RlvrError(
                "Which of the machines is this?",
                f"Add --node-rank, from 1 to {config.nodes - 1}; 0 is the one that has the run.",
            )
    if found >= config.nodes:
        raise RlvrError(f"--node-rank {found}, and there are {config.nodes} machines.", f"Use 0 to {config.nodes - 1}.")
    return found


def rendezvous(config: TrainingConfig) -> tuple[str, int]:
    """Return host and port of --rendezvous."""
    host, _, port = config.rendezvous.rpartition(":")
    return host, int(port)


def lend_trainers(config: TrainingConfig) -> bool:
    """On another machine than the first: run its trainers until the run has ended. Returns whether this is another machine.

    Raises:
        RlvrError: a trainer here has ended with an error, or this machine's devices are too few.
        Interrupted: a signal arrived, and the first machine did not end the run by itself.
    """
    rank = node_rank(config)
    if rank == 0 or config.dry_run:
        return False
    each = config.trainers // config.nodes
    placed = place(config.device, engine="transformers", in_process=True, cuda_devices=[*cuda_devices()], trainers=each)
    first = rank * each
    console.say(
        f"machine        {rank + 1} of {config.nodes}: trainers {first} to {first + each - 1} of {config.trainers}, for {config.rendezvous}"
    )
    workers: list[Worker] = []
    statuses: list[int | None] = [None]
    try:
        for number, device in enumerate(placed.trainers, start=first):
            workers.append(start_trainer(number, size=config.trainers, address=config.rendezvous, place=device))
        with StopRequest() as stop:
            said = False
            while None in statuses and not any(statuses):
                statuses = [worker.status for worker in workers]
                if stop.requested and not said:
                    said = True
                    console.say(
                        "waiting for the first machine, which saves and ends the run; once more ends this one now"
                    )
                time.sleep(0.1)
    except KeyboardInterrupt:
        raise Interrupted from None
    finally:
        for worker in workers:
            worker.kill()
    if failed := next(filter(None, statuses), None):  # not of one that was killed for it
        raise RlvrError(
            f"A trainer of this machine ended with status {failed}.",
            "Its own messages, if it has any, are above, or the first machine's say why. Resume on all machines.",
        )
    return True


def _is_here(host: str) -> bool:
    """Whether an address is this machine's: whether one can listen there."""
    with suppress(OSError), socket.create_server((host, 0)):
        return True
    return False
