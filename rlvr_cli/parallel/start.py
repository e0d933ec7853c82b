"""Start a worker where its place is: on this machine, or on a node of the cluster."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlvr_cli.errors import missing_extra
from rlvr_cli.parallel.places import device_of, node_of
from rlvr_cli.parallel.shared_memory import SharedMemory
from rlvr_cli.parallel.worker import LocalWorker, Worker
from rlvr_cli.process import available_cores

if TYPE_CHECKING:
    from rlvr_cli.parallel.cluster import Cluster


def join(address: str) -> "Cluster":
    """Join the cluster of --cluster. Raises RlvrError if Ray is not installed, or there is no cluster."""
    if find_spec("ray") is None:
        raise missing_extra("ray", "ray")
    from rlvr_cli.parallel import cluster  # here: it imports Ray

    return cluster.join(address)


def _joined() -> "Cluster":
    from rlvr_cli.parallel import cluster  # here: it imports Ray

    return cluster.joined()


def reserve(places: Sequence[str], *, first: bool = False) -> str:
    """Have the cluster keep these places for this run; nothing to do for devices of this machine. As `Cluster.reserve`."""
    return _joined().reserve(places, first=first) if any(map(node_of, places)) else ""


def cores_of(place: str) -> int:
    """How many CPU cores there are where a place is: of this machine, those that the process may use; of a node, those that the cluster may give."""
    if (name := node_of(place)) is None:
        return available_cores()
    return _joined().node(name).cpus


def start_worker(
    name: str,
    entry: str,
    *,
    place: str,
    arguments: Mapping[str, Any],
    title: str,
    hint: str,
    sees_only: bool = False,
    threads: int = 0,
    memory: SharedMemory | None = None,
) -> Worker:
    """Start a worker.

    Args:
        place: where, see `places`.
        sees_only: of the CUDA devices of this machine, that of its place. On a cluster it sees no other anyway.
        memory: what it gets to map, with its descriptor as the argument `weights`; on another node a copy, see `Worker.share`.
        name, entry, arguments, title, hint, threads: of `LocalWorker`.

    Raises:
        NodeLost: the node has left the cluster.
    """
    if node_of(place) is not None:
        started = {"name": name, "entry": entry, "arguments": {**arguments}, "title": title, "hint": hint}
        return _joined().start(place, started | {"threads": threads}, memory=memory)
    mapped = {} if memory is None else {"weights": memory.descriptor}
    return LocalWorker(
        name,
        entry,
        arguments={**arguments, **mapped},
        title=title,
        hint=hint,
        device=device_of(place) if sees_only else "",
        threads=threads,
        descriptors=list(mapped.values()),
    )
