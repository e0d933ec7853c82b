"""Which device computes what: the trainer, and the sampling engine.

Enters: --device, the engine, and the CUDA devices that are visible. Leaves: a `Placement`. Nothing is opened.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlvr_cli.errors import RlvrError
from rlvr_cli.samplers.open import engine_kind


@dataclass(frozen=True)
class Placement:
    """Where a training run computes.

    Attributes:
        trainer: the device of the policy and its optimizer: cpu, mps, cuda:0, cuda:1, ...
        engine: the device of the sampling engine. Equal to `trainer` if the engine samples from the policy's own model.
        unused: the CUDA devices on which nothing computes.
    """

    trainer: str
    engine: str
    unused: tuple[str, ...] = ()

    @property
    def shared(self) -> bool:
        """Whether trainer and engine compute on the same CUDA device."""
        return self.trainer == self.engine and self.trainer.startswith("cuda")


def place(device: str, *, engine: str, in_process: bool, cuda_devices: Sequence[str]) -> Placement:
    """Place the trainer and the engine.

    vLLM in the trainer's process always takes the first CUDA device, so the trainer takes the second one, if there is
    one. An engine in a process of its own takes the device after the trainer's.

    Args:
        device: --device, of the trainer; one that exists.
        engine: the name of the sampling engine.
        in_process: whether the engine is in the trainer's process (--async-steps 0).
        cuda_devices: the visible ones: cuda:0, cuda:1, ...

    Raises:
        RlvrError: vLLM in its own process would have to share the trainer's device.
    """
    shares_model = engine_kind(engine).share is not None
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


def placement_line(placement: Placement, *, engine: str) -> str:
    """The placement on one line of the plan."""
    title = engine_kind(engine).title
    if placement.trainer == placement.engine:
        text = f"{placement.trainer}, for training and {title}"
    else:
        text = f"{placement.trainer} for training, {placement.engine} for {title}"
    return text + (f"; {', '.join(placement.unused)} not used" if placement.unused else "")
