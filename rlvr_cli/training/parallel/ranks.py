"""The trainer processes of a run, each with an equal copy of the policy: its rank among them, and what they do together.

Rank 0 is the process of the command: it has the run, samples, grades and saves. The others compute their share of each
update, so that all copies stay equal: gradients are summed over the ranks, and each makes the same step.

Enters: a rank, how many there are, and where rank 0 listens. Leaves: `Ranks`, whose methods all ranks must call in the same
order (torch.distributed: gloo between CPUs, NCCL between GPUs).
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[reportPrivateImportUsage]  # they are public
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlvr_cli.parallel.places import LOOPBACK

WITHIN_AN_UPDATE = timedelta(minutes=30)  # a rank that is this much later than another one hangs
BETWEEN_UPDATES = timedelta(days=365)  # rank 0 may sample, grade or evaluate for hours while the others wait
ENDED = "ended"  # the note of rank 0 that it ends the others, so that those which see it do not say that they are lost
PULSE = 1.0  # seconds between two signs of life
ASKED_WITHIN = timedelta(seconds=10)  # rank 0's own store, for these signs
HEARD_WITHIN = timedelta(seconds=0.1)  # rank 0 waits for this long at a time, and a signal is handled after it
LEFT_WITHIN = 5.0  # seconds in which those that were killed have ended their connections
BUCKET = 2**25  # numbers that are summed over the ranks at a time


class RankLost(Exception):
    """Another rank has ended, or did not answer in time."""


class Elsewhere(Exception):
    """Another rank has raised an error and abandons what all do together."""


class Ranks:
    """This process among the trainers of a run. `Ranks()` is the only one.

    Attributes:
        rank: from 0.
        size: how many there are.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        store: TCPStore | None = None,
        control: Any = None,
        prompt: Any = None,
    ) -> None:
        """Use `join` where there are others.

        Args:
            store: shared by all ranks.
            control: the process group of `broadcast` and `gather` between updates, on which a rank waits as long as it takes.
            prompt: that of `gather` within an update.
        """
        self.rank, self.size = rank, size
        self._store, self._control, self._prompt = store, control, prompt
        self._waits = False  # whether it waits in `_wait`, or has given that up
        self._nothing = torch.zeros(1)  # for `_meet`; kept, so that gloo's thread is never the one that frees it

    def deal(self, costs: Sequence[float]) -> list[int]:
        """Divide pieces of work among the ranks, each to the one that has least to do so far.

        Args:
            costs: of each piece, the same on all ranks.

        Returns:
            The numbers of this rank's pieces, ascending.
        """
        loads = [0.0] * self.size
        own = []
        for number, cost in enumerate(costs):
            least = loads.index(min(loads))
            loads[least] += cost
            if least == self.rank:
                own.append(number)
        return own

    def deal_in_step(self, costs: Sequence[float], kinds: Sequence[Hashable]) -> list[tuple[int, bool]]:
        """Divide pieces of work of several kinds so that all ranks do equally many of each kind, in the same order of kinds.

        The n-th pieces of all ranks are of similar cost. A rank that has fewer repeats a cheap piece.

        Args:
            costs, kinds: of each piece, the same on all ranks.

        Returns:
            The numbers of the pieces that this rank does, and whether each is its own; a repeated one is not.
        """
        own = []
        for kind in dict.fromkeys(kinds):
            numbers = sorted((n for n in range(len(costs)) if kinds[n] == kind), key=lambda n: -costs[n])
            for start in range(0, len(numbers), self.size):
                turn = numbers[start : start + self.size]
                own.append((turn[self.rank], True) if self.rank < len(turn) else (numbers[-1], False))
        return own

    def agree(self, check: Callable[[], None]) -> None:
        """Call `check` on all ranks. If it raises an error on one of them, that one raises it, and the others `Elsewhere`."""
        error: BaseException | None = None
        try:
            check()
        except BaseException as raised:
            error = raised
        [anywhere] = self.anywhere([error is not None])
        if error is not None:
            raise error
        if anywhere:
            raise Elsewhere

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Add up each tensor over the ranks, in place. All ranks have the same bits afterwards."""
        if self.size > 1:
            with self._together():
                for bucket in _buckets(tensors):
                    flat = torch.cat([tensor.flatten() for tensor in bucket])
                    self._wait(dist.all_reduce(flat, async_op=not flat.is_cuda))
                    for tensor, total in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                        tensor.copy_(total.view(tensor.shape))

    def anywhere(self, here: Sequence[bool]) -> list[bool]:
        """Return for each of the conditions whether it holds on any rank."""
        if self.size == 1:
            return list(here)
        counts = torch.tensor(here, dtype=torch.int32)
        self.sum([counts])
        return [count > 0 for count in counts.tolist()]

    def broadcast(self, value: Any = None) -> Any:
        """Return the value of rank 0, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        with self._together():
            self._meet(self._control)
            dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors of rank 0 into those of the other ranks."""
        if self.size > 1:
            with self._together():
                for tensor in tensors:
                    flat = tensor.contiguous()
                    self._wait(dist.broadcast(flat, src=0, async_op=not flat.is_cuda))
                    if flat is not tensor:
                        tensor.copy_(flat)

    def gather(self, value: Any, *, patient: bool = False, check: Callable[[], None] = lambda: None) -> list[Any]:
        """Return the values of all ranks on rank 0; an empty list on the others.

        Args:
            patient: wait as long as it takes. Else a rank that is later than `WITHIN_AN_UPDATE` is lost.
            check: called while rank 0 waits; it ends that by raising an error, after which the ranks can only `leave`.
        """
        if self.size == 1:
            return [value]
        group = self._control if patient else self._prompt
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._together():
            self._meet(group, check=check)
            dist.gather_object(value, found, dst=0, group=group)
        return found or []

    def first_difference(self, tensors: Mapping[str, Tensor]) -> tuple[int, str] | None:
        """Compare tensors of the same names bit for bit. Returns on rank 0 which rank has another one than rank 0, and its name."""
        own, *others = self.gather(bits(tensors)) or [{}]
        different = (
            (rank, name) for rank, other in enumerate(others, start=1) for name in own if own[name] != other[name]
        )
        return next(different, None)

    def post(self, key: str) -> None:
        """Leave a note that `posted` finds on every rank, without waiting for them."""
        if self._store is not None:
            self._store.set(key, "1")

    def posted(self, key: str) -> bool:
        """Return whether a rank has left this note."""
        return self._store is not None and self._store.check([key])

    def signs_of_life(self) -> dict[int, int]:
        """Return how many signs of life each other rank has given (`alive`). Any thread may ask; nobody is waited for."""
        if self._store is None:
            return {}
        with suppress(RuntimeError):  # the store is closed
            own = TCPStore(self._store.host, self._store.port, is_master=False, timeout=ASKED_WITHIN)
            return {rank: own.add(f"alive/{rank}", 0) for rank in range(self.size) if rank != self.rank}
        return {}

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Return the mesh of all ranks, on this type of device."""
        return init_device_mesh(device.type, (self.size,))

    def leave(self) -> None:
        """End the connections to the other ranks."""
        if self.size > 1 and dist.is_initialized():
            if not self._waits:
                dist.destroy_process_group()
                return
            self._control = self._prompt = None
            # gloo ends when all that was begun has ended, which may be never where a machine is gone.
            ending = threading.Thread(target=dist.destroy_process_group)
            ending.start()
            ending.join(LEFT_WITHIN)

    def _meet(self, group: Any, *, check: Callable[[], None] = lambda: None) -> None:
        """Wait until all ranks are here: what cannot be waited for by `_wait` then takes no time."""
        self._wait(dist.all_reduce(self._nothing, group=group, async_op=True), check=check)

    def _wait(self, work: Any, *, check: Callable[[], None] = lambda: None) -> None:
        """Wait until all ranks have done something, within `_together`.

        Python handles signals only between its own instructions, and PyTorch waits in C++. So rank 0, which gets them, looks up
        every `HEARD_WITHIN`; `check` is called then. A rank does not notice it sooner or later that the others are done.

        Args:
            work: of gloo; None: of NCCL, for which the device waits.
        """
        if work is None:
            return
        if self.rank == 0:
            self._waits = True
            while not work.is_completed():
                with suppress(RuntimeError):  # not yet; an error of the work is raised below
                    work.wait(HEARD_WITHIN)
                check()
            self._waits = False
        work.wait()

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo's and NCCL's errors are no class of their own
            raise RankLost(str(error)) from error


ALONE = Ranks()


@contextmanager
def losses_within() -> Iterator[None]:
    """Raise RankLost where code that talks to the other ranks by itself, as FSDP's does, finds one gone, or they cannot connect."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise RankLost(str(error)) from error
        raise


def listen(host: str = LOOPBACK) -> tuple[TCPStore, str]:
    """Begin to listen for the other ranks, as rank 0, at any free port.

    Args:
        host: an address of this machine.

    Returns:
        The store for `join`, and HOST:PORT for the other ranks.

    Raises:
        OSError: the address is not this machine's.
    """
    server = socket.create_server((host, 0))
    port = server.getsockname()[1]
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=WITHIN_AN_UPDATE, master_listen_fd=server.detach()
    )
    return store, f"{host}:{port}"


def connect(address: str) -> TCPStore:
    """Connect to rank 0, which listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=WITHIN_AN_UPDATE)


def announce(store: TCPStore, rank: int) -> None:
    """Let rank 0 know that this rank is about to join."""
    store.set(f"here/{rank}", "1")


@contextmanager
def alive(address: str, rank: int) -> Iterator[None]:
    """Give rank 0, which listens at HOST:PORT, a sign of life every `PULSE` seconds within the block, from a thread of its own.

    There is none from a process that is stopped, or whose machine or network is gone. One that waits or computes gives it.
    """
    ended = threading.Event()

    def give() -> None:
        with suppress(RuntimeError):  # rank 0 has ended
            store = connect(address)
            while not ended.wait(PULSE):
                store.add(f"alive/{rank}", 1)

    thread = threading.Thread(target=give, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=PULSE)


def await_others(store: TCPStore, size: int, *, check: Callable[[], None]) -> None:
    """Wait, as rank 0, until the other ranks are about to join; `check` is called meanwhile, and ends it if it raises."""
    for rank in range(1, size):
        while not store.check([f"here/{rank}"]):
            check()
            time.sleep(0.05)


def join(store: TCPStore, *, rank: int, size: int, device: torch.device, loopback: bool) -> Ranks:
    """Join the other ranks: all must call it.

    Args:
        device: on which this rank computes.
        loopback: whether all are on this machine.

    Raises:
        RankLost: another rank has ended while they connected, or did not do so in time.
    """
    if loopback and sys.platform == "linux":
        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", "lo"
        )  # else gloo looks up the machine's name, which may have no address
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
    with losses_within():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=PrefixStore("ranks", store),
            rank=rank,
            world_size=size,
            timeout=WITHIN_AN_UPDATE,
            device_id=device if on_cuda else None,
        )
        control = dist.new_group(backend="gloo", timeout=BETWEEN_UPDATES)
        prompt = dist.new_group(backend="gloo", timeout=WITHIN_AN_UPDATE)
    return Ranks(rank, size, store=store, control=control, prompt=prompt)


def bits(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a number for each tensor that changes when one of its bits does (the sum of its values, read as integers)."""
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [t.detach().view(as_integers[t.dtype.itemsize]).sum(dtype=torch.int64) for t in tensors.values()]
    return dict(zip(tensors, torch.stack(sums).tolist(), strict=True)) if sums else {}


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group neighbors of one dtype and device, up to `BUCKET` numbers unless one alone has more."""
    for _, alike in groupby(tensors, key=lambda tensor: (tensor.dtype, tensor.device)):
        bucket: list[Tensor] = []
        for tensor in alike:
            if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket
