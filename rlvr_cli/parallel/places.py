"""Where processes of a run are on a cluster: which node, and which device there.

Enters: the nodes, and how many trainers and samplers. Leaves: a place for each, such as n2/cpu or n2/cuda:0, or an error that says
what is missing. A place without a node, such as cuda:1, is on this machine, which needs no cluster.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlvr_cli.errors import RlvrError

LOOPBACK = "127.0.0.1"


class NodeLost(RlvrError):
    """A node has left the cluster, with what ran on it; elsewhere it can be started again."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster.

    Attributes:
        name: n1 is the one on which the command runs, n2, ... the others.
        id: the cluster's own for it.
        address: at which the others reach it.
        cpus, gpus: how many the cluster may give on it.
    """

    name: str
    id: str
    address: str
    cpus: int
    gpus: int


def divide(
    nodes: Sequence[Node], *, trainers: int, samplers: int, gpus_for: Sequence[bool], called: str = "sampler"
) -> list[str]:
    """Return a place for each trainer and then for each sampler. The first trainer is on the first node: it is the command itself.

    On a CPU each goes where most are left, so that the nodes share the work. GPUs are filled node by node, trainers first.

    Args:
        gpus_for: whether trainers, and whether samplers, need a GPU each.
        called: a sampler in messages.

    Raises:
        RlvrError: the cluster has too few CPUs or GPUs, or its first node none for the first trainer.
    """
    cpus, gpus = {node.name: node.cpus for node in nodes}, {node.name: node.gpus for node in nodes}
    places = []
    for number in range(trainers + samplers):
        on_gpu = gpus_for[number >= trainers]
        left = gpus if on_gpu else cpus
        if number == 0 and trainers:
            node = nodes[0].name
        elif on_gpu:
            node = next((name for name in left if left[name]), nodes[0].name)
        else:
            node = max(left, key=lambda name: left[name])  # the first of equal ones
        if left[node] < 1:
            counts = {"trainer": trainers, called: samplers}
            raise _too_few(nodes, counts, gpus_for, first=number == 0 and trainers > 0)
        left[node] -= 1
        places.append(f"{node}/cuda:{_gpus(nodes, node) - left[node] - 1}" if on_gpu else f"{node}/cpu")
    return places


def _gpus(nodes: Sequence[Node], name: str) -> int:
    return next(node.gpus for node in nodes if node.name == name)


def _too_few(nodes: Sequence[Node], counts: Mapping[str, int], gpus_for: Sequence[bool], *, first: bool) -> RlvrError:
    parts = [
        f"{count} {what}{'s' * (count > 1)} on {'GPUs' if on_gpu else 'CPUs'}"
        for (what, count), on_gpu in zip(counts.items(), gpus_for, strict=True)
        if count
    ]
    has = "; ".join(f"{node.name} ({node.address}): {node.cpus} CPUs, {node.gpus} GPUs" for node in nodes)
    where = ", the first of them here" if first else ""
    return RlvrError(
        f"The cluster has too little for {' and '.join(parts)}{where}: it has {has}.",
        "Each takes one CPU or one GPU. Use fewer, or start more nodes, or begin on a node that has what the first trainer needs.",
    )


def node_of(place: str) -> str | None:
    """The node of a place; None for one of this machine alone."""
    node, separator, _ = place.rpartition("/")
    return node if separator else None


def device_of(place: str) -> str:
    """The device of a place, as the process there sees it: on a cluster it sees no other GPU than its own."""
    node, _, device = place.rpartition("/")
    return "cuda:0" if node and device.startswith("cuda") else device


def places_line(
    nodes: Sequence[Node], trainers: Sequence[str], samplers: Sequence[str], *, called: str = "sampler"
) -> str:
    """Who is where, on one line of the plan.

    Args:
        trainers: their places. The first may be without a node: it is on the first.
        samplers: their places; those without a node are not named.
        called: a sampler.
    """
    on: dict[str, list[str]] = {node.name: [] for node in nodes}
    for what, places in (("trainer", trainers), (called, samplers)):
        for number, place in enumerate(places):
            node = node_of(place) or (nodes[0].name if what == "trainer" else None)
            if node in on:
                device = place.rpartition("/")[2]
                on[node].append(f"{what} {number}" + (f" on {device}" if device != "cpu" else ""))
    return "; ".join(f"{n.name} ({n.address}): {', '.join(on[n.name]) or 'nothing'}" for n in nodes)
