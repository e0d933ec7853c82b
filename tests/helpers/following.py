"""Requests that come after others while these are sampled, as the turns of episodes do: `types.MoreRequests`, without an environment."""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from rlvr_cli.types import Completion, Request


class Following:
    """Follows completions with requests; who consumes the completions says of each with `add` that it has come.

    Args:
        first: what is asked to begin with.
        turns: how many follow each other at most.
        next_of: a completion -> the request that follows it; None: none does.
        seconds: until it comes.

    Attributes:
        asked: all requests, in the order of their indices.
    """

    def __init__(
        self,
        first: Sequence[Request],
        next_of: Callable[[Completion], Request | None],
        *,
        turns: int,
        seconds: float = 0.02,
    ) -> None:
        self.asked, self._turns = [*first], [turns] * len(first)
        self._next_of, self._seconds = next_of, seconds
        self._come: SimpleQueue[tuple[Request, int]] = SimpleQueue()
        self._pending = 0
        self._notify: Callable[[], None] = lambda: None

    def add(self, completion: Completion) -> None:
        left = self._turns[completion.request_index]
        request = self._next_of(completion) if left else None
        if request is None:
            return
        self._pending += 1

        def come() -> None:
            self._come.put((request, left - 1))
            self._notify()

        threading.Timer(self._seconds, come).start()

    def notify(self, call: Callable[[], None]) -> None:
        self._notify = call

    def take(self, *, wait: bool) -> list[Request]:
        taken: list[Request] = []
        while self._pending and (not self._come.empty() or (wait and not taken)):
            request, left = self._come.get()
            self._pending -= 1
            self._turns.append(left)
            taken.append(request)
        self.asked += taken
        return taken
