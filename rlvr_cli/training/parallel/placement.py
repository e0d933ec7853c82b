"""Which device computes what: the trainer, and the sampling engine.

Enters: --device, the engine, and the CUDA devices that are visible, or the nodes of a cluster. Leaves: a `Placement`. Nothing is opened.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlvr_cli.errors import RlvrError
from rlvr_cli.parallel.places import LOOPBACK, Node, divide, node_of, places_line
from rlvr_cli.parallel.start import join, reserve
from rlvr_cli.process import available_cores
from rlvr_cli.samplers.open import engine_kind

MOST_PER_CORE, MOST_ON_FEW_CORES = 4, 16  # processes of the model on a CPU; more are a mistake
ELSEWHERE = "other machines"  # or devices, of servers that we did not start


@dataclass(frozen=True)
class Placement:
    """Where a training run computes.

    Attributes:
        trainer: the device of the policy and its optimizer: cpu, mps, cuda:0, cuda:1, ...
        engine: the device of the sampling engine. Equal to `trainer` if the engine samples from the policy's own model.
        unused: the CUDA devices on which nothing computes.
        others: the devices of the other trainers (--trainers).
        other_engines: the devices of the engine's other processes (--samplers).
        nodes: of the cluster, where `others` and the engine's may be places on it (`parallel.places`).
    """

    trainer: str
    engine: str
    unused: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    other_engines: tuple[str, ...] = ()
    nodes: tuple[Node, ...] = ()

    @property
    def address(self) -> str:
        """At which other trainers reach the first one."""
        return self.nodes[0].address if any(map(node_of, self.trainers)) else LOOPBACK

    def reserved(self) -> "Placement":
        """Have the cluster keep the places, if there is one. Raises RlvrError if others have taken them."""
        if not self.nodes:
            return self
        first = f"{self.nodes[0].name}/{self.trainer}"
        apart = [place for place in self.engines if node_of(place)]
        own = reserve([first, *self.others, *apart], first=True)
        return replace(self, trainer=own, engine=self.engine if apart else own) if own else self

    @property
    def engines(self) -> tuple[str, ...]:
        """The device of each process of the engine."""
        return (self.engine, *self.other_engines)

    @property
    def trainers(self) -> tuple[str, ...]:
        """The device of each trainer; the first is this process."""
        return (self.trainer, *self.others)

    @property
    def shared(self) -> bool:
        """Whether trainer and engine compute on the same CUDA device."""
        return self.trainer == self.engine and self.trainer.startswith("cuda")


def place(
    device: str,
    *,
    engine: str,
    in_process: bool,
    cuda_devices: Sequence[str],
    trainers: int = 1,
    samplers: int = 1,
) -> Placement:
    """Place the trainers and the engine.

    vLLM in the trainer's process always takes the first CUDA device, so the trainer takes the second one, if there is
    one. Engines in processes of their own take the devices after the trainers'. Several trainers or samplers take a CUDA device
    each, or share the CPU.

    Args:
        device: --device, of the trainer; one that exists.
        engine: the name of the sampling engine.
        in_process: whether the engine is in the trainer's process (--async-steps 0, --samplers 1).
        cuda_devices: the visible ones: cuda:0, cuda:1, ...
        trainers: how many.
        samplers: how many processes of the engine, if it is not in the trainer's.

    Raises:
        RlvrError: vLLM in its own process would have to share the trainer's device, or there are fewer devices than trainers and
            samplers.
    """
    if engine_kind(engine).elsewhere:
        alone = place(device, engine="transformers", in_process=True, cuda_devices=cuda_devices, trainers=trainers)
        return replace(alone, engine=ELSEWHERE)
    shares_model = engine_kind(engine).share is not None
    if trainers > 1 or samplers > 1:
        apart = 0 if in_process else samplers
        first, *others = _divide(device, engine=engine, samplers=apart, cuda_devices=cuda_devices, trainers=trainers)
        sampler, *other_engines = others[trainers - 1 :] or [first]
        others = others[: trainers - 1]
        unused = tuple(d for d in cuda_devices if d not in (first, *others, sampler, *other_engines))
        return Placement(first, sampler, unused, tuple(others), tuple(other_engines))
    if device == "auto" and cuda_devices:
        trainer = cuda_devices[1 if in_process and not shares_model and len(cuda_devices) > 1 else 0]
    else:
        trainer = {"auto": "cpu", "cuda": "cuda:0"}.get(device, device)
    if in_process and shares_model:
        sampler = trainer
    elif in_process:
        sampler = cuda_devices[0] if cuda_devices else "cpu"
    elif trainer in cuda_devices:
        sampler = cuda_devices[(cuda_devices.index(trainer) + 1) % len(cuda_devices)]
    else:
        sampler = cuda_devices[0] if cuda_devices and not shares_model else trainer
    if not in_process and not shares_model and sampler == trainer and trainer in cuda_devices:
        raise RlvrError(
            f"{engine_kind(engine).title} cannot sample during training on the trainer's own device, {trainer}: both need its memory at once.",
            "Make a second GPU visible, or use --async-steps 0 (they take turns), or --engine transformers.",
        )
    return Placement(trainer, sampler, tuple(d for d in cuda_devices if d not in (trainer, sampler)))


def place_on(
    nodes: Sequence[Node], device: str, *, engine: str, in_process: bool, trainers: int, samplers: int
) -> Placement:
    """Place the trainers and the engine on the nodes of a cluster. The first trainer is on the first node, this machine.

    Args:
        device: --device. With cpu, or where no node has a GPU, all is on CPUs.

    Raises:
        RlvrError: the cluster has too little.
    """
    apart = 0 if in_process else samplers
    first, *others = _places_on(nodes, device, engine=engine, trainers=trainers, samplers=apart)
    here = first.rpartition("/")[2]
    engines = others[trainers - 1 :] or [here]
    return Placement(here, engines[0], (), tuple(others[: trainers - 1]), tuple(engines[1:]), tuple(nodes))


def _places_on(nodes: Sequence[Node], device: str, *, engine: str, trainers: int, samplers: int) -> list[str]:
    if not samplers:
        _check_divisible(engine, trainers)
    if device not in ("auto", "cpu", "cuda"):
        raise RlvrError(
            f"--device {device} names one device, and --cluster has many.", "Use cpu or cuda, or leave it out."
        )
    gpus = device == "cuda" or (device == "auto" and any(node.gpus for node in nodes))
    sampling = gpus or (engine_kind(engine).share is None and any(node.gpus for node in nodes))
    return divide(nodes, trainers=trainers, samplers=samplers, gpus_for=(gpus, sampling))


def place_samplers(device: str, *, engine: str, samplers: int, cuda_devices: Sequence[str]) -> list[str]:
    """Place the processes of an engine where nobody trains. Raises RlvrError if there are fewer devices."""
    if samplers == 1:
        return [device]
    return _divide(device, engine=engine, samplers=samplers, cuda_devices=cuda_devices, trainers=0)


def sampler_devices(device: str, *, engine: str, samplers: int, cluster: str = "") -> list[str]:
    """Return the device of each process of --samplers; without them, --device. Raises RlvrError if there are too few.

    Args:
        cluster: --cluster. Its nodes are joined.
    """
    if samplers == 1:
        return [device]
    if cluster:
        return _places_on(join(cluster).nodes, device, engine=engine, trainers=0, samplers=samplers)
    from rlvr_cli.models.compute.device import cuda_devices, resolve_device  # here: endpoints do without torch

    resolve_device(device)
    return place_samplers(device, engine=engine, samplers=samplers, cuda_devices=[*cuda_devices()])


def _divide(device: str, *, engine: str, samplers: int, cuda_devices: Sequence[str], trainers: int) -> list[str]:
    """Return the device of each trainer and then of each sampler; there are none if the trainers sample."""
    kind = engine_kind(engine)
    if not samplers:
        _check_divisible(engine, trainers)
    who = _who(trainers, samplers)
    if device.startswith("cuda:") or device == "mps":
        raise RlvrError(
            f"--device {device} names one GPU for {who}.",
            "Leave --device out, and choose the GPUs with CUDA_VISIBLE_DEVICES.",
        )
    on_gpus = 0 if device == "cpu" else trainers
    on_gpus += (
        0 if device == "cpu" and kind.share is not None else samplers
    )  # vLLM computes on a GPU wherever it sees one
    if cuda_devices and on_gpus > len(cuda_devices):
        fewer = "fewer of them" if samplers > 1 else f"--trainers {max(len(cuda_devices) - samplers, 1)}"
        raise RlvrError(
            f"{who} need a GPU each; {len(cuda_devices)} can be seen.", f"Use {fewer}, or make more GPUs visible."
        )
    gpus = list(cuda_devices[:on_gpus])
    cores, on_cpu = available_cores(), trainers + samplers - len(gpus)
    if on_cpu > (most := max(MOST_PER_CORE * cores, MOST_ON_FEW_CORES)):
        raise RlvrError(
            f"{who} would be {on_cpu:,} processes on {cores} core{'s' * (cores > 1)}, each with weights of its own.",
            f"Use at most {most}; more than one for each core are hardly faster.",
        )
    return ["cpu"] * (trainers + samplers - len(gpus)) + gpus


def _check_divisible(engine: str, trainers: int) -> None:
    if (kind := engine_kind(engine)).share is None:
        raise RlvrError(
            f"{kind.title} in the trainer's process samples for one trainer, and --trainers is {trainers}.",
            "Use --engine transformers: each trainer samples a share with its own weights. Or --samplers 2, or --trainers 1.",
        )


def _who(trainers: int, samplers: int) -> str:
    """The processes in words; one sampler is that of --async-steps."""
    trains = f"{trainers} trainer{'s' * (trainers > 1)}" if trainers else ""
    samples = {0: "", 1: "the sampler of --async-steps"}.get(samplers, f"{samplers} samplers")
    return " and ".join(filter(None, (trains, samples)))


def placement_line(placement: Placement, *, engine: str) -> str:
    """The placement on one line of the plan."""
    title = engine_kind(engine).title
    if placement.nodes:
        return places_line(placement.nodes, placement.trainers, placement.engines)
    trainers = ", ".join(dict.fromkeys(placement.trainers))
    if len(placement.trainers) > 1:
        trainers += f" ({len(placement.trainers)} trainers)"
    if placement.other_engines:
        title += f" in {len(placement.engines)} processes"
    if placement.trainer == placement.engine:
        text = f"{trainers}, for training and {title}"
    else:
        text = f"{trainers} for training, {', '.join(dict.fromkeys(placement.engines))} for {title}"
    return text + (f"; {', '.join(placement.unused)} not used" if placement.unused else "")
