"""A trainer that follows rank 0, which starts it (`trainers.Trainers`): `python -m rlvr_cli.training.follow`.

What takes long to import is imported in a function: before that, `main` sees to it that the process dies with its parent.
"""

import signal
import sys

from rlvr_cli.process import STOP_SIGNALS, die_with_parent


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
    from rlvr_cli.models.device import out_of_memory_as_user_error
    from rlvr_cli.terminal import console
    from rlvr_cli.training.ranks import RankLost, announce, connect, join
    from rlvr_cli.training.replica import Replica

    try:
        store = connect(address)
        announce(store, rank)
        ranks = join(store, rank=rank, size=size, device=torch.device(device))
        fault_point("joined")
        replica = Replica(ranks.broadcast(), device=device, ranks=ranks)
        while True:
            method, arguments, options = ranks.broadcast()
            with out_of_memory_as_user_error():
                getattr(replica, method)(*arguments, **options)
    except RankLost:
        sys.exit(1)
    except RlvrError as error:
        console.say(f"error: trainer {rank}: {error.problem}")
        console.say(f"  {error.hint}")
        sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
