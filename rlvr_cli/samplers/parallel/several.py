"""Several samplers of the same weights as one: they divide the requests, and another one answers for one that fails.

Enters: samplers by name; then requests. Leaves: completions in the order in which they arrive. Weights, prompt and seed decide a
sample, not who answers: what a sampler leaves unanswered is asked again of the others, and gives the same.
"""

import logging
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from rlvr_cli.errors import QuestionsRefused, RlvrError
from rlvr_cli.process import stoppable
from rlvr_cli.types import Completion, MoreRequests, Request, SamplingParams

logger = logging.getLogger(__name__)

Key = tuple[int, int]  # indices of a request and of its seed
Share = list[tuple[int, list[int]]]  # indices of requests, and of the seeds of each


class OfAll(RlvrError):
    """An error that ends the call, since the others may fail in the same way."""


class Answering(Protocol):
    """What this module needs of a sampler: `sample` of `types.Sampler`, or of `types.JoinableSampler`. It is asked in a thread of its own."""

    @property
    def sample(self) -> Callable[..., Generator[Completion]]: ...


Member = TypeVar("Member", bound=Answering)


class SeveralSamplers(Generic[Member]):
    """Samplers that divide the requests. A sampler that raises an RlvrError is left out; the last one's error is raised, and any `OfAll`.

    One that refuses questions stays: these are not asked of another.

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

    def sample(
        self, requests: Sequence[Request], params: SamplingParams, *, more: MoreRequests | None = None
    ) -> Generator[Completion]:
        """Answer every seed of every request; completions come in the order in which they arrive.

        Args:
            more: requests that are asked as they come, where the members' `sample` takes such; they have the indices after those
                of `requests`.

        Raises:
            QuestionsRefused: some questions were refused; raised after all other completions were yielded.
            RlvrError: that of the last sampler.
        """
        self.settle()
        refused: list[QuestionsRefused] = []
        asked, missing = [*requests], {(i, j) for i, request in enumerate(requests) for j in range(len(request.seeds))}
        while missing:  # what one left unanswered
            yield from self._answers(asked, missing, params, more, refused)
            for request in more.take(wait=True) if more and not missing else ():  # all have refused something
                missing.update((len(asked), j) for j in range(len(request.seeds)))
                asked.append(request)
        if refused:
            raise QuestionsRefused.joined(refused)

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
        self,
        asked: list[Request],
        missing: set[Key],
        params: SamplingParams,
        more: MoreRequests | None,
        refused: list[QuestionsRefused],
    ) -> Iterator[Completion]:
        """Ask each sampler for its share. One that fails is left out; the last one's error, and any that is not its own, is raised.

        Args:
            asked: all requests; those that come are added.
            missing: of them; what is answered or refused is removed.
            refused: what samplers say of that is added.
        """
        found: queue.SimpleQueue[tuple[str, Completion] | tuple[str, Exception | None] | None] = queue.SimpleQueue()
        shares = {name: _Asked(share) for name, share in divide(missing, list(self.members)).items() if share}
        working, closing = set(shares), threading.Event()
        by: dict[Key, str] = {}  # the member that answered a sample, which is asked what comes after it, too

        def ask(name: str, share: _Asked, first: list[Request]) -> None:
            error = None
            try:
                completions = self.members[name].sample(first, params, **({"more": share} if more else {}))
                for completion in completions:
                    found.put((name, share.answered(completion)))
                    if closing.is_set():
                        break
                completions.close()
            except Exception as problem:  # the other thread raises it
                error = problem
            found.put((name, error))

        if more:
            more.notify(lambda: found.put(None))
        self._threads = []
        for name, share in shares.items():
            first = [_part(asked[i], samples) for i, samples in share.places]
            self._threads.append(threading.Thread(target=ask, args=(name, share, first), daemon=True))
        for thread in self._threads:
            thread.start()
        try:
            while working:
                if more and not closing.is_set():
                    for request in more.take(wait=not any(shares[name].missing for name in working)):
                        missing |= {(len(asked), j) for j in range(len(request.seeds))}
                        own = by.get(request.after) if request.after else None
                        name = own if own in working else min(working, key=lambda name: len(shares[name].missing))
                        shares[name].add(len(asked), [*range(len(request.seeds))], of=request)
                        asked.append(request)
                    if not any(shares[name].missing for name in working):
                        closing.set()
                        for share in shares.values():
                            share.end()
                with stoppable():
                    said = found.get()
                if said is None:
                    continue
                name, item = said
                if isinstance(item, Completion):
                    key = item.request_index, item.sample_index
                    by[key] = name
                    shares[name].missing.remove(key)
                    missing.remove(key)
                    yield item
                    continue
                working.remove(name)
                if isinstance(item, QuestionsRefused):
                    refused.append(item)
                    missing -= shares[name].give_up()
                elif isinstance(item, RlvrError) and not isinstance(item, OfAll):
                    self.leave_out(name, item)
                elif item is not None:
                    raise item
                if more:  # at once: the others' calls go on
                    for other, share in divide(shares[name].missing, [*working]).items():
                        for i, samples in share:
                            shares[other].add(i, samples, of=asked[i])
        finally:
            closing.set()
            for share in shares.values():
                share.end()


class _Asked:
    """What one member is asked in a call. It is `types.MoreRequests` to it.

    Args:
        share: to begin with.

    Attributes:
        places: what is asked, in its order.
        missing: what the call has not got of it.
    """

    def __init__(self, share: Share) -> None:
        self.places = [*share]
        self.missing = {(i, j) for i, samples in share for j in samples}
        self._taken = len(share)  # of the places
        self._open = len(self.missing)  # what it has taken and not answered
        self._coming: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._notify: Callable[[], None] = lambda: None

    def notify(self, call: Callable[[], None]) -> None:
        self._notify = call

    def add(self, index: int, samples: list[int], *, of: Request) -> None:
        """Ask for these samples of a request, in the running call."""
        self.places.append((index, samples))
        self.missing |= {(index, j) for j in samples}
        self._coming.put(_part(of, samples))
        self._notify()

    def end(self) -> None:
        """Say that no more will come."""
        self._coming.put(None)
        self._notify()

    def take(self, *, wait: bool) -> list[Request]:
        """See `types.MoreRequests`. A member that waits and has left something unanswered gets no more: it has failed."""
        taken: list[Request] = []
        while not self._coming.empty() or (wait and not taken and not self._open):
            request = self._coming.get()
            if request is None:
                self._coming.put(None)
                break
            taken.append(request)
            self._open += len(request.seeds)
        self._taken += len(taken)
        return taken

    def give_up(self) -> set[Key]:
        """Remove what the member has taken from `missing`, when its call has ended, and return it."""
        taken = self.missing & {(i, j) for i, samples in self.places[: self._taken] for j in samples}
        self.missing -= taken
        return taken

    def answered(self, completion: Completion) -> Completion:
        """Return what the member has answered, with the indices of the call."""
        self._open -= 1
        i, samples = self.places[completion.request_index]
        return replace(completion, request_index=i, sample_index=samples[completion.sample_index])


def _part(request: Request, samples: Sequence[int]) -> Request:
    """Return the request for some of its samples alone; what it came after has another index in a member's call."""
    return replace(request, seeds=tuple(request.seeds[j] for j in samples), after=None)


def divide(samples: Iterable[tuple[int, int]], names: Sequence[str]) -> dict[str, Share]:
    """Deal (request, seed) index pairs to the names; those of a request stay together, so that its prompt is computed once."""
    by_request: dict[int, list[int]] = {}
    for i, j in sorted(samples):
        by_request.setdefault(i, []).append(j)
    places = [*by_request.items()]
    return {name: places[number :: len(names)] for number, name in enumerate(names)}
