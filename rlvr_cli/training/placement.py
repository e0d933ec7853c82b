"""Which device computes what: the trainer, and the sampling engine.

Enters: --device, the engine, and the CUDA devices that are visible. Leaves: a `Placement`. Nothing is opened.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlvr_cli.errors import RlvrError
from rlvr_cli.samplers.open import engine_kind

ELSEWHERE = "other machines"  # or devices, of servers that we did not start


@dataclass(frozen=True)
class Placement:
    """Where a training run computes.

    Attributes:
        trainer: the device of the policy and its optimizer: cpu, mps, cuda:0, cuda:1, ...
        engine: the device of the sampling engine. Equal to `trainer` if the engine samples from the policy's own model.
        unused: the CUDA devices on which nothing computes.
        others: the devices of the other trainers (--trainers).
    """

    trainer: str
    engine: str
    unused: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def trainers(self) -> tuple[str, ...]:
        """The device of each trainer; the first is this process."""
        return (self.trainer, *self.others)

    @property
    def shared(self) -> bool:
        """Whether trainer and engine compute on the same CUDA device."""
        return self.trainer == self.engine and self.trainer.startswith("cuda")


def place(device: str, *, engine: str, in_process: bool, cuda_devices: Sequence[str], trainers: int = 1) -> Placement:
    """Place the trainers and the engine.

    vLLM in the trainer's process always takes the first CUDA device, so the trainer takes the second one, if there is
    one. An engine in a process of its own takes the device after the trainers'. Several trainers take a CUDA device each, or
    share the CPU.

    Args:
        device: --device, of the trainer; one that exists.
        engine: the name of the sampling engine.
        in_process: whether the engine is in the trainer's process (--async-steps 0).
        cuda_devices: the visible ones: cuda:0, cuda:1, ...
        trainers: how many.

    Raises:
        RlvrError: vLLM in its own process would have to share the trainer's device, or there are fewer devices than trainers.
    """
    if engine_kind(engine).elsewhere:
        alone = place(device, engine="transformers", in_process=True, cuda_devices=cuda_devices, trainers=trainers)
        return replace(alone, engine=ELSEWHERE)
    shares_model = engine_kind(engine).share is not None
    if trainers > 1:
        return _place_several(
            device, engine=engine, in_process=in_process, cuda_devices=cuda_devices, trainers=trainers
        )
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


def _place_several(
    device: str, *, engine: str, in_process: bool, cuda_devices: Sequence[str], trainers: int
) -> Placement:
    kind = engine_kind(engine)
    if in_process and kind.share is None:
        raise RlvrError(
            f"{kind.title} in the trainer's process samples for one trainer, and --trainers is {trainers}.",
            "Use --engine transformers: each trainer samples a share with its own weights. Or --trainers 1.",
        )
    if device.startswith("cuda:"):
        raise RlvrError(
            f"--device {device} names one GPU for {trainers} trainers.",
            "Leave --device out, and choose the GPUs with CUDA_VISIBLE_DEVICES.",
        )
    if device == "cpu" or not cuda_devices:
        return Placement(
            "cpu", cuda_devices[0] if cuda_devices and not in_process else "cpu", others=("cpu",) * (trainers - 1)
        )
    needed = trainers + (not in_process)
    if needed > len(cuda_devices):
        more = "" if in_process else " and one for sampling meanwhile (--async-steps)"
        raise RlvrError(
            f"{trainers} trainers need a GPU each{more}; {len(cuda_devices)} can be seen.",
            f"Use --trainers {max(len(cuda_devices) - (not in_process), 1)}, or make more GPUs visible.",
        )
    first, *others = cuda_devices[:trainers]
    sampler = first if in_process else cuda_devices[trainers]
    return Placement(first, sampler, tuple(cuda_devices[needed:]), tuple(others))


def placement_line(placement: Placement, *, engine: str) -> str:
    """The placement on one line of the plan."""
    title = engine_kind(engine).title
    trainers = ", ".join(dict.fromkeys(placement.trainers))
    if len(placement.trainers) > 1:
        trainers += f" ({len(placement.trainers)} trainers)"
    if placement.trainer == placement.engine:
        text = f"{trainers}, for training and {title}"
    else:
        text = f"{trainers} for training, {placement.engine} for {title}"
    return text + (f"; {', '.join(placement.unused)} not used" if placement.unused else "")
