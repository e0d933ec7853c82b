"""The model and the device that it is on."""

from dataclasses import dataclass

from rlvr_cli.config.parsing.options import Provenance, knob


@dataclass(frozen=True)
class ModelOptions(Provenance):
    model: str = knob(
        "",
        "Local directory or hub id of the model. Empty: the built-in tiny model.",
        group="Model",
        common=True,
        completes="model",
        free_on_resume=True,
    )
    device: str = knob("auto", "Torch device of the model: auto, cpu, cuda, cuda:1.", group="Model")
    max_batch_size: int | None = knob(
        None, "Sequences that the transformers engine decodes at once. Default: chosen from the available memory.",
        group="Model", free_on_resume=True, at_least=1,
    )  # fmt: skip
    cuda_graphs: bool = knob(
        True, "Replay the transformers engine's decode steps as CUDA graphs, without Python overhead.", group="Model", free_on_resume=True
    )  # fmt: skip
