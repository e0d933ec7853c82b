"""The trainer processes of a run, as the command sees them: they are started, told what to do, and ended.

Enters: the options of a training command and a device for each trainer. Leaves: a `Trainers`. The other
trainers (`follow`) have a `Replica` of their own and call the methods that this process calls.
"""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar, cast

import torch

from rlvr_cli.config.shared.training import TrainingConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.policy import Policy
from rlvr_cli.parallel.worker import Worker
from rlvr_cli.process import StopRequest
from rlvr_cli.training.parallel.follow import start_trainer
from rlvr_cli.training.parallel.ranks import ALONE, ENDED, LOOPBACK, RankLost, Ranks, await_others, join, listen
from rlvr_cli.training.parallel.replica import share
from rlvr_cli.training.parallel.sharded_replica import WholeState, open_replica
from rlvr_cli.types import Completion, Request, Sampler, SamplingParams

T = TypeVar("T")
_PATIENCE = 5.0  # seconds in which a trainer that was lost also ends, and one that lives gives a sign of it
# What all trainers do together, by the method of the replica.
_TOGETHER = {
    "update": "in an update",
    "scores": "while they computed log-probabilities",
    "gather": "while they put the weights together",
    "gather_state": "while they put the optimizer's state together",
    "copy_rank_0": "while they took over the checkpoint",
    "sample": "while they sampled",
}


class Trainers:
    """All trainers of a run, of which this process is rank 0. Close it in the end.

    Attributes:
        replica: this process's own.
        sample: whether all of them sample, each with the weights of its own replica.
        stop: a signal that the run has got.
    """

    def __init__(
        self, config: TrainingConfig, *, devices: Sequence[str], stop: StopRequest, address: str = LOOPBACK
    ) -> None:
        """Start the other trainers, and load the model in all of them.

        Args:
            devices: of each trainer, this process first: of this machine, or places on a cluster.
            address: at which those of the cluster reach this process.
            stop: ends what this process waits for.

        Raises:
            RlvrError: as `load_policy`; or another trainer has ended.
        """
        self.stop = stop
        self._workers: list[Worker] = []
        self._ranks = ALONE
        self.sample = False
        try:
            if config.trainers > 1:
                self._start(config, devices, address=address)
            with self._losses_as_user_errors():
                self.replica = open_replica(config, device=devices[0], ranks=self._ranks)
        except BaseException:
            self.close()
            raise

    def _start(self, config: TrainingConfig, devices: Sequence[str], *, address: str) -> None:
        store, address = listen(address)
        size = config.trainers
        for rank, device in enumerate(devices[1:], start=1):
            self._workers.append(start_trainer(rank, size=size, address=address, place=device))

        def wait() -> None:
            self.stop.check()
            self._check()

        await_others(store, size, check=wait)
        with self._losses_as_user_errors():
            device = torch.device(devices[0])
            loopback = address.startswith(LOOPBACK)
            self._ranks = _while_checking(
                lambda: join(store, rank=0, size=size, device=device, loopback=loopback), check=wait
            )
            if device.type == "cuda":
                torch.cuda.set_device(device)  # `join` set that of its own thread
            self._ranks.broadcast(config)

    @property
    def size(self) -> int:
        """How many trainers there are."""
        return self._ranks.size

    @property
    def policy(self) -> Policy:
        """The policy, with its weights until the next update or the next log-probabilities."""
        if not self.replica.is_whole:
            self.do("gather", everywhere=self.sample)
        return self.replica.policy

    @contextmanager
    def state_gathered(self) -> Iterator[torch.optim.Optimizer]:
        """Give the optimizer with its whole state, to be saved within the block."""
        optimizer = self.replica.optimizer
        if not isinstance(optimizer, WholeState):
            # A copy has it. The others are not told: after a signal they may wait for this one in an update that it has abandoned.
            yield optimizer
            return
        self.do("gather_state")
        try:
            yield optimizer
        finally:
            optimizer.state.clear()

    def do(self, method: str, /, *arguments: Any, **options: Any) -> Any:
        """Call a method of the replica on every rank. Returns what this one's returns.

        Raises:
            RlvrError: that of this rank's method; or another trainer has ended.
        """
        self.tell(method, *arguments, **options)
        with self._losses_as_user_errors(method):
            return getattr(self.replica, method)(*arguments, **options)

    def tell(self, method: str, /, *arguments: Any, **options: Any) -> None:
        """Call a method of the replica on every other rank. This one must take part in what it does together with them."""
        with self._losses_as_user_errors(method):
            self._ranks.broadcast((method, arguments, options) if self.size > 1 else None)

    @property
    def given_up(self) -> bool:
        """Whether a signal ends the run without the others. They are needed once more where they have a part of what is saved."""
        return self.stop.requested and (self.stop.at_once or not self.replica.config.fsdp)

    def gathered(self, canceled: str) -> list[Any]:
        """Return what the ranks `gather` at the end of `sample`, which was told to the others; this one gives nothing.

        Args:
            canceled: the note after which they answer no more (`Replica.sample`). A signal leaves it.

        Raises:
            RlvrError: another trainer has ended.
            Interrupted: a signal arrived, and they were not waited for; nothing can be done together afterwards.
        """

        def check() -> None:
            if self.stop.requested:
                self._ranks.post(canceled)
            if self.given_up:
                self.stop.check()

        with self._losses_as_user_errors("sample"):
            return self._ranks.gather([], patient=True, check=check)

    def dismiss(self) -> None:
        """Let the other trainers end by themselves, with status 0."""
        if self.size > 1:
            with self._losses_as_user_errors():
                self._ranks.broadcast(None)

    def close(self) -> None:
        """End the other trainers. Closing twice is allowed."""
        self._ranks.post(ENDED)
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._ranks.leave()
        self._ranks = ALONE

    def silent(self) -> list[str]:
        """Wait some seconds, and name the other trainers that gave no sign of life meanwhile.

        Raises:
            RlvrError: one has ended.
        """
        before, until = self._ranks.signs_of_life(), time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            self._check()
            time.sleep(0.05)
        after = self._ranks.signs_of_life()
        own = {rank: f" (process {worker.pid})" for rank, worker in enumerate(self._workers, start=1)}
        return [f"trainer {rank}{own.get(rank, '')}" for rank in before if after.get(rank) == before[rank]]

    def _check(self) -> None:
        """Raise RlvrError if another trainer has ended."""
        for worker in self._workers:
            worker.check()

    @contextmanager
    def _losses_as_user_errors(self, method: str = "") -> Iterator[None]:
        try:
            yield
        except RankLost as error:
            silent = self.silent()
            where = _TOGETHER.get(method, "at their start or end")
            where += f"; {', '.join(silent)} gave no sign of life" if silent else ""
            raise RlvrError(
                f"The trainers lost each other {where}: {str(error).splitlines()[0]}",
                "Resume with --resume.",
            ) from error


def _while_checking(call: Callable[[], T], *, check: Callable[[], None]) -> T:
    """Call something in a thread, and `check` meanwhile, which ends the waiting if it raises.

    Ranks that meet wait for each other in PyTorch, for half an hour, also for one that has just died.
    """
    found: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            found.put((call(), None))
        except BaseException as error:  # the other thread raises it
            found.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    while True:
        try:
            result, error = found.get(timeout=0.05)
        except queue.Empty:
            check()
            continue
        if error is not None:
            raise error
        return cast(T, result)


class DividedSampler:
    """The embedded engine of every trainer, or what plays episodes with it: each answers its share of the requests.

    Args:
        own: this process's.
        sleep_mode: whether the others' engines give their memory back after sampling, as this one's does when it is asked to.
    """

    def __init__(self, own: Sampler, trainers: Trainers, *, sleep_mode: bool) -> None:
        self._own, self._trainers, self._sleep_mode, self._calls = own, trainers, sleep_mode, count()
        self.worked_seconds: float | None = None
        self.arrived = ()

    @property
    def engine(self) -> str:
        return self._own.engine

    @property
    def policy_version(self) -> int:
        return self._own.policy_version

    @property
    def seeding(self) -> str:
        return self._own.seeding

    @property
    def notes(self) -> Sequence[str]:
        return self._own.notes

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Generator[Completion]:
        """Answer every seed of every request; this process's share comes first.

        A response does not depend on the number of trainers, beyond how batches of other rows round.
        """
        started = time.perf_counter()
        trainers, ranks = self._trainers, self._trainers.replica.ranks
        canceled = f"canceled/{next(self._calls)}"
        how = {"version": self.policy_version, "sleep_mode": self._sleep_mode, "canceled": canceled}
        trainers.tell("sample", list(requests), params, **how)
        completions = self._own.sample(share(requests, ranks), params)
        gathered: list[list[Completion]] | None = None
        try:
            for completion in completions:
                yield _at(completion, 0, ranks)
            gathered = trainers.gathered(canceled)
            for rank, found in enumerate(gathered):
                for completion in found:
                    yield _at(completion, rank, ranks)
            trainers.stop.check()  # a signal may have ended the others' shares
            self.worked_seconds = time.perf_counter() - started
        finally:
            completions.close()
            if gathered is None:  # closed early, or failed: the others must not wait
                ranks.post(canceled)
                with suppress(RlvrError):  # what ended this one is said; the next call tells if the others are gone
                    if not trainers.given_up:
                        trainers.gathered(canceled)

    def load_weights(self, policy: Any, policy_version: int) -> None:
        """Load and verify this process's weights; the others do so when they sample."""
        self._own.load_weights(policy, policy_version)

    def sleep(self) -> None:
        self._own.sleep()

    def close(self) -> None:
        self._own.close()


def _at(completion: Completion, rank: int, ranks: Ranks) -> Completion:
    """Give a completion of a rank's share its place among all requests."""
    return replace(completion, request_index=rank + ranks.size * completion.request_index)
