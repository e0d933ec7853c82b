"""Where the runs of a sweep are made, some at a time: on this machine, or on the nodes of a cluster.

Enters: --jobs, --devices or --cluster, and the configs of the runs. Leaves: a `Slot` for each run at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.parallel.places import divide, node_of, places_line
from rlvr_cli.parallel.start import join, reserve


@dataclass(frozen=True)
class Slot:
    """Room for one run at a time.

    Attributes:
        place: of its process (`parallel.places`).
        visible: the value of CUDA_VISIBLE_DEVICES there; empty: as it is.
    """

    place: str = "cpu"
    visible: str = ""


def gpus_of(config: Any) -> int:
    """How many GPUs a run computes on where there are enough: its trainers', and those of samplers in processes of their own."""
    if config.device == "cpu":
        return 0
    trainers = getattr(config, "trainers", 0)
    samplers = config.samplers if config.samplers > 1 or not trainers else int(getattr(config, "async_steps", 0) > 0)
    elsewhere = config.sampler_urls or getattr(config, "base_url", "")
    return trainers + (0 if elsewhere else samplers)


def slots_here(jobs: int, devices: Sequence[str], configs: Sequence[Any]) -> list[Slot]:
    """Slots of this machine: one for each value of CUDA_VISIBLE_DEVICES, or as many as there are runs at a time.

    Args:
        jobs: how many runs at a time.
        devices: the values.
        configs: of the runs.

    Raises:
        RlvrError: a run is of several processes that want a GPU each, and `devices` give it one; or as `check_servers`.
    """
    check_servers(configs, at_once=len(devices) or jobs)
    if devices and (config := next((c for c in configs if c.device != "cpu" and _needs_several_gpus(c)), None)):
        raise RlvrError(
            f"With --devices each run of a sweep has one GPU, and {config.run} wants several: --trainers, --samplers or --async-steps.",
            "Leave --devices out: then each run sees all GPUs, and with --jobs 1 has them for itself.",
        )
    return [Slot(visible=device) for device in devices] or [Slot()] * jobs


def check_servers(configs: Sequence[Any], *, at_once: int, alone: str = "--jobs 1, without --devices") -> None:
    """Raise RlvrError if runs at the same time would give a vLLM server their weights in turn; adapters have names of their own.

    Args:
        alone: the options with which one is made at a time.
    """
    asked: dict[str, list[Any]] = {}
    for config in configs if at_once > 1 else ():
        for url in filter(None, config.sampler_urls.split(",")):
            asked.setdefault(url.strip().rstrip("/"), []).append(config)
    for url, those in asked.items():
        loads = next((c for c in those if getattr(c, "trainers", 0) and not c.lora_rank), None)
        if loads is not None and len(those) > 1:
            raise RlvrError(
                f"{loads.run} gives the server {url} its weights while another run would sample with it: {at_once} run at a time.",
                f"Make one at a time ({alone}), give each run servers of its own (one seed per arm), or train "
                "adapters (--lora-rank).",
            )


def _wants_several(config: Any) -> bool:
    return config.samplers > 1 or getattr(config, "trainers", 1) > 1


def _needs_several_gpus(config: Any) -> bool:
    """Also of a sampler beside the training, which vLLM on the trainer's GPU cannot be."""
    beside = getattr(config, "async_steps", 0) and config.engine != "transformers" and not config.sampler_urls
    return bool(_wants_several(config) or beside)


def slots_on(cluster: str, jobs: int, configs: Sequence[Any]) -> tuple[list[Slot], str]:
    """Slots on the nodes of a cluster, of one GPU or one CPU each, and who is where, in words.

    Args:
        cluster: its address, or auto.
        jobs: how many.
        configs: of the runs.

    Raises:
        RlvrError: there is no cluster, it has too little, or a run is of several processes that want places of their own; or as
            `check_servers`.
    """
    check_servers(configs, at_once=jobs)
    for config in configs:
        if _wants_several(config) or config.cluster:
            raise RlvrError(
                f"With --cluster each run of a sweep has one place, and {config.run} wants several: --trainers or --samplers.",
                "Leave them out, or start such runs one by one, each with --cluster.",
            )
    nodes = join(cluster).nodes
    on_gpu = any(node.gpus for node in nodes) and not all(config.device == "cpu" for config in configs)
    places = divide(nodes, trainers=0, samplers=jobs, gpus_for=(on_gpu, on_gpu), called="run")
    return [Slot(place) for place in places], places_line(nodes, (), places, called="run")


def keep(slots: Sequence[Slot]) -> None:
    """Have the cluster keep the slots that are on its nodes. Raises RlvrError if others have taken them."""
    if places := [slot.place for slot in slots if node_of(slot.place)]:
        reserve(places)
