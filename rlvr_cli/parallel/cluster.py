"""A Ray cluster on which workers of a run are started. All that is known of Ray is here.

Enters: --cluster, and places. Leaves: the nodes, and a `RayWorker` for each place. On its node a worker is the `LocalWorker` of a
`Host`, an actor, which ends with the command, whatever happens to that, and its worker with it.
"""

import json
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlvr_cli.errors import RlvrError
from rlvr_cli.faults import environment_of
from rlvr_cli.parallel.host import Host, handed_on
from rlvr_cli.parallel.places import Node, NodeLost, node_of
from rlvr_cli.parallel.shared_memory import SharedMemory
from rlvr_cli.parallel.worker import Worker, encoded
from rlvr_cli.process import STOP_SIGNALS, stoppable

_START_SECONDS = 60.0  # for the cluster to give what it has, and to start a process
_SLICE = 0.2  # seconds between two looks at signals
_joined: "Cluster | None" = None


class Cluster:
    """The cluster that this command has joined. Use `join`.

    Attributes:
        nodes: the machines that are there; this one, n1, first. Those that have left are missing after the next `join`.
    """

    def __init__(self, address: str) -> None:
        try:
            _check_listens(address)
            with _own_signals():
                ray.init(
                    address=address,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    runtime_env={"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}},
                )
                # A thread of Ray prints of nodes that died on stdout, which is for results; a worker's loss is told by us.
                with suppress(AttributeError, KeyError):
                    inside: Any = vars(ray)["_private"].worker.global_worker
                    inside.threads_stopped.set()  # else the thread never rests once its channel is closed
                    inside.gcs_error_subscriber.close()
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise RlvrError(
                f"There is no cluster at {address}: {str(error).splitlines()[0]}",
                "Start one with: ray start --head, and on each other machine: ray start --address HOST:6379. If ray start said that it has token "
                "authentication: RAY_AUTH_MODE=token here, too, with its token in RAY_AUTH_TOKEN or ~/.ray/auth_token.",
            ) from error
        self._known: dict[str, Node] = {}  # by its id, also those that have left
        self.look()
        # Hosts connect, and nobody answers: the connections break when this process ends, however it does.
        family = socket.AF_INET6 if ":" in self.nodes[0].address else socket.AF_INET
        self._life = socket.create_server(("", 0), family=family, backlog=4096)
        self._group: Any = None
        self._bundles: list[str] = []  # the node of each of the group's
        self._content: tuple[SharedMemory, int, Any] | None = None  # of which memory, after which write, in the store

    def look(self) -> None:
        """See which nodes are there now. A node keeps its name; one that has come back is another."""
        here = ray.get_runtime_context().get_node_id()
        alive = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: (n["NodeID"] != here, n["NodeID"]))
        for node in alive:
            has, name = node["Resources"], f"n{len(self._known) + 1}"
            found = Node(
                name, node["NodeID"], node["NodeManagerAddress"], int(has.get("CPU", 0)), int(has.get("GPU", 0))
            )
            self._known.setdefault(found.id, found)
        self.nodes = [self._known[node["NodeID"]] for node in alive]

    def reserve(self, places: Sequence[str], *, first: bool) -> str:
        """Have the cluster keep these places for this run, instead of those that it kept.

        Args:
            first: whether the first place is this process's own.

        Returns:
            The CUDA device that is this process's own; empty if it has none.

        Raises:
            RlvrError: others have taken them.
        """
        if self._group is not None:
            remove_placement_group(self._group)
        self._bundles = [n.name for n in self.nodes if any(node_of(place) == n.name for place in places)]
        wanted = []
        for name in self._bundles:
            on_node = [place for place in places if node_of(place) == name]
            gpus = sum(not place.endswith("cpu") for place in on_node)
            wanted.append({what: count for what, count in (("CPU", len(on_node) - gpus), ("GPU", gpus)) if count})
        selectors = [{"ray.io/node-id": self.node(name).id} for name in self._bundles]
        self._group = placement_group(wanted, strategy="PACK", bundle_label_selector=selectors)
        self._wait_for_group(len(places))
        if not first or places[0].endswith("cpu"):
            return ""
        self._keeper = self._actor(_Keeper, places[0])
        with stoppable():
            return f"cuda:{ray.get(self._keeper.device.remote(), timeout=_START_SECONDS)}"

    def _wait_for_group(self, count: int) -> None:
        ready, until = self._group.ready(), time.monotonic() + _START_SECONDS
        while True:
            with stoppable():
                if ray.wait([ready], timeout=1.0)[0]:
                    return
            alive = {n["NodeID"] for n in ray.nodes() if n["Alive"]}
            gone = next((node for node in map(self.node, self._bundles) if node.id not in alive), None)
            if gone is not None or time.monotonic() > until:
                break
        remove_placement_group(self._group)
        self._group = None
        if gone is not None:
            raise NodeLost(
                f"The node {gone.name} ({gone.address}) has left the cluster.",
                "The same command, or --resume, goes on with the nodes that are there now.",
            )
        raise RlvrError(
            f"The cluster did not give {count} places within {_START_SECONDS:.0f} s: others have taken them.",
            "Wait until they have ended (ray status shows what is free), or use fewer.",
        )

    def start(self, place: str, started: dict[str, Any], *, memory: SharedMemory | None) -> "RayWorker":
        """Start a worker at one of the places that are kept. Raises NodeLost if its node has left the cluster.

        Args:
            started: the arguments of `LocalWorker`.
        """
        node = self.node(node_of(place) or "")
        if not any(n["NodeID"] == node.id and n["Alive"] for n in ray.nodes()):
            raise NodeLost(f"The node {node.name} ({node.address}) has left the cluster.", "Resume with --resume.")
        kept = handed_on(environment_of(started["name"]))
        host = self._actor(
            Host, place, folder=os.getcwd(), variables=kept, weights=memory is not None, started=started,
            command=(self.nodes[0].address, self._life.getsockname()[1]),
        )  # fmt: skip
        return RayWorker(
            host, self, title=f"{started['title']} on {node.name} ({node.address})", hint=started["hint"], memory=memory
        )

    def content(self, memory: SharedMemory) -> Any:
        """What is in the memory, in the cluster's object store: it goes to each node once, however many workers read it there."""
        if self._content is None or self._content[0] is not memory or self._content[1] != memory.writes:
            self._content = None  # the store gives the room of the one before back
            self._content = memory, memory.writes, ray.put(np.frombuffer(memory.mapped(), dtype=np.uint8))
        return self._content[2]

    def node(self, name: str) -> Node:
        """The node of this name, whether it is still there or not."""
        return next(node for node in self._known.values() if node.name == name)

    def _actor(self, kind: type, place: str, **arguments: Any) -> Any:
        on_gpu = not place.endswith("cpu")
        group = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=self._bundles.index(node_of(place) or "")
        )
        options: dict[str, Any] = {
            "num_cpus": 0 if on_gpu else 1,
            "num_gpus": int(on_gpu),
            "max_restarts": 0,
            "concurrency_groups": {"send": 1, "receive": 1, "wait": 1},
            "scheduling_strategy": group,
        }
        return ray.remote(**options)(kind).remote(**arguments)


class _Keeper:
    """Keeps the GPU of the first trainer, which is no actor."""

    def device(self) -> int:
        return int(ray.get_gpu_ids()[0])


class RayWorker(Worker):
    """A worker on a node of the cluster. Messages to it are in order; what it says arrives as it is said.

    Args:
        host: the actor of a `Host`.
        memory: what it gets to read, see `share`.
        title, hint: as of `LocalWorker`.
    """

    def __init__(self, host: Any, cluster: Cluster, *, title: str, hint: str, memory: SharedMemory | None) -> None:
        self._host, self._cluster, self._title, self._hint, self._memory = host, cluster, title, hint, memory
        self._inbox: deque[bytes] = deque()
        self._shared = 0  # what it has of the memory
        self._end: tuple[int, str] | None = None
        self._lost = False
        self._pid_asked = host.pid.remote()
        self._ending = host.wait.options(concurrency_group="wait").remote()
        self._receiving = self._ask()
        self._until = time.monotonic() + _START_SECONDS

    @property
    def pid(self) -> int:
        return ray.get(self._pid_asked)

    @property
    def status(self) -> int | None:
        if self._end is None and ray.wait([self._ending], timeout=0)[0]:
            try:
                self._end = ray.get(self._ending)
            except RayError as error:
                self._lost = True
                self._end = -signal.SIGKILL, f"its node or its host is gone: {str(error).splitlines()[0]}"
        if self._end is None and time.monotonic() > self._until:
            if not ray.wait([self._pid_asked], timeout=0)[0]:
                self._lost = True
                self._end = -signal.SIGKILL, f"it did not start within {_START_SECONDS:.0f} s"
            self._until = float("inf")
        return None if self._end is None else self._end[0]

    def check(self) -> None:
        if self.status is not None:
            raise self._ended()

    def send(self, message: Any) -> None:
        self.check()
        self._host.send.options(concurrency_group="send").remote(encoded(message))

    def share(self) -> None:
        memory = self._memory
        if memory is not None and memory.writes != self._shared:
            self._host.load.options(concurrency_group="send").remote(self._cluster.content(memory))
            self._shared = memory.writes

    def receive(self, *, within: float | None = None) -> Any:
        until = None if within is None else time.monotonic() + within
        while not self._inbox:
            left = _SLICE if until is None else min(_SLICE, max(until - time.monotonic(), 0))
            try:
                with stoppable():
                    self._inbox.extend(ray.get(self._receiving, timeout=left))
            except GetTimeoutError:
                self.check()
                if until is not None and time.monotonic() >= until:
                    raise TimeoutError from None
                continue
            except RayError:
                pass  # `check` says that it has ended
            if not self._inbox:
                ray.wait([self._ending], timeout=_START_SECONDS)
                self.check()
            self._receiving = self._ask()  # while what has come is read, more does
        return json.loads(self._inbox.popleft())

    def _ask(self) -> Any:
        """Have the host wait for messages."""
        return self._host.receive.options(concurrency_group="receive").remote()

    def interrupt(self) -> None:
        self._host.interrupt.options(concurrency_group="send").remote()  # not before what was sent

    def kill(self) -> None:
        with suppress(RayError):  # it is gone already
            ray.wait([self._host.kill.remote()], timeout=_SLICE * 10)
            ray.kill(self._host)
        if self._end is None:
            self._end = -signal.SIGKILL, ""

    def _ended(self) -> RlvrError:
        assert self._end is not None
        status, errors = self._end
        said = "".join(f"\n    {line}" for line in errors.splitlines())
        kind = NodeLost if self._lost else RlvrError
        return kind(f"{self._title} ended with status {status}.{said}", self._hint)


def join(address: str) -> Cluster:
    """Join the cluster at this address, or auto: the one of this machine. Joining again gives the same one, with the nodes that are there then.

    Raises RlvrError if there is no cluster.
    """
    global _joined
    if _joined is None:
        _joined = Cluster(address)
    else:
        _joined.look()
    return _joined


def joined() -> Cluster:
    """The cluster that was joined."""
    assert _joined is not None
    return _joined


def _check_listens(address: str) -> None:
    """Raise OSError or ValueError if nobody listens at HOST:PORT, for which Ray itself waits for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise ValueError("an address is HOST:PORT, or auto")
    host = host.removeprefix("[").removesuffix("]")  # as Ray writes an IPv6 address
    socket.create_connection((host, int(port)), timeout=_START_SECONDS / 6).close()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep our handlers of signals within the block, in which Ray sets its own."""
    own = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in own.items():
            signal.signal(number, handler)
