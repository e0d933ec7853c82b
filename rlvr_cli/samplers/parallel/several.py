"""Several samplers of the same weights as one: they divide the requests, and another one answers for one that fails.

Enters: samplers by name; then requests. Leaves: completions in the order in which they arrive. Weights, prompt and seed decide a
sample, not who answers: what a sampler leaves unanswered is asked again of the others, and gives the same.
"""

import logging
import queue
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from rlvr_cli.errors import RlvrError
from rlvr_cli.process import stoppable
from rlvr_cli.types import Completion, Request, SamplingParams

logger = logging.getLogger(__name__)

Share = list[tuple[int, list[int]]]  # indices of requests, and of the seeds of each


class Answering(Protocol):
    """What this module needs of a sampler. It is asked in a thread of its own."""

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Generator[Completion]: ...


Member = TypeVar("Member", bound=Answering)


class SeveralSamplers(Generic[Member]):
    """Samplers that divide the requests. A sampler that raises an RlvrError is left out; the last one's error is raised.

    Attributes:
        members: the samplers that are not left out, by name.
        left_out: which ones were left out, and why, one sentence each.
    """

    worked_seconds = None
    arrived = ()

    def __init__(self, members: dict[str, Member]) -> None:
        self.members = members
        self.left_out: tuple[str, ...] = ()
        self._threads: list[threading.Thread] = []

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Generator[Completion]:
        """Answer every seed of every request; completions come in the order in which they arrive.

        Raises:
            RlvrError: that of the last sampler.
        """
        self.settle()
        missing = {(i, j) for i, request in enumerate(requests) for j in range(len(request.seeds))}
        while missing:
            for completion in self._answers(divide(missing, list(self.members)), requests, params):
                missing.remove((completion.request_index, completion.sample_index))
                yield completion

    def settle(self) -> None:
        """Wait until nobody works on earlier requests: of a call that was closed, samplers finish what they are at."""
        while self._threads:
            self._threads.pop().join()

    def leave_out(self, name: str, error: RlvrError, *, why: str = "is left out") -> None:
        """Go on without a sampler. Raises its error if it is the last one."""
        if len(self.members) == 1:
            raise error
        del self.members[name]
        self.note(f"The sampler {name} {why}: {error.problem}")

    def note(self, text: str) -> None:
        """Say what became of a sampler."""
        self.left_out += (text,)
        logger.warning(text)

    def _answers(
        self, shares: dict[str, Share], requests: Sequence[Request], params: SamplingParams
    ) -> Iterator[Completion]:
        """Ask each sampler for its share. One that fails is left out; the last one's error, and any that is not its own, is raised."""
        found: queue.SimpleQueue[Completion | tuple[str, Exception | None]] = queue.SimpleQueue()
        closing = threading.Event()

        def ask(name: str, share: Share) -> None:
            asked = [replace(requests[i], seeds=tuple(requests[i].seeds[j] for j in samples)) for i, samples in share]
            error = None
            try:
                completions = self.members[name].sample(asked, params)
                for completion in completions:
                    i, samples = share[completion.request_index]
                    found.put(replace(completion, request_index=i, sample_index=samples[completion.sample_index]))
                    if closing.is_set():
                        break
                completions.close()
            except Exception as problem:  # the other thread raises it
                error = problem
            found.put((name, error))

        self._threads = [threading.Thread(target=ask, args=item, daemon=True) for item in shares.items() if item[1]]
        for thread in self._threads:
            thread.start()
        working = len(self._threads)
        try:
            while working:
                with stoppable():
                    item = found.get()
                if isinstance(item, Completion):
                    yield item
                    continue
                working -= 1
                name, error = item
                if isinstance(error, RlvrError):
                    self.leave_out(name, error)
                elif error is not None:
                    raise error
        finally:
            closing.set()


def divide(samples: Iterable[tuple[int, int]], names: Sequence[str]) -> dict[str, Share]:
    """Deal (request, seed) index pairs to the names; those of a request stay together, so that its prompt is computed once."""
    by_request: dict[int, list[int]] = {}
    for i, j in sorted(samples):
        by_request.setdefault(i, []).append(j)
    places = [*by_request.items()]
    return {name: places[number :: len(names)] for number, name in enumerate(names)}
