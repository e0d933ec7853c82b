"""Gradient checkpointing: of each layer only the input is kept for the backward pass, which computes the rest again.

It is that of transformers, but it also works in eval mode (training here has no dropout) and with the attention of
`prefixes`, which must be in place again when a layer is computed a second time.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.compute.prefixes import attention_function


@contextlib.contextmanager
def gradient_checkpointing(
    model: PreTrainedModel, again: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
) -> Iterator[None]:
    """Run the model's layers in this way within the block; the backward pass may come later. Results do not change.

    Args:
        again: makes the context in which a layer is computed a second time, with the first time's autocast already on.

    Raises:
        RlvrError: the model has no layers that transformers can run in this way.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise RlvrError(
            f"The layers of {type(model).__name__} have no gradient checkpointing.",
            "Use smaller micro-batches instead.",
        )
    config: Any = model.config

    @contextlib.contextmanager
    def second_time(layer: nn.Module, name: str) -> Iterator[None]:
        with _evaluating(layer), attention_function(model, name), again():
            yield

    def run(layer: nn.Module, forward: Callable[..., Any], *inputs: Any) -> Any:
        name = config._attn_implementation
        return checkpoint(
            forward,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (_evaluating(layer), second_time(layer, name)),
        )

    flags = {"training": True, "gradient_checkpointing": True}
    names = (*flags, "_gradient_checkpointing_func")
    before = [{name: vars(layer)[name] for name in names if name in vars(layer)} for layer in layers]
    for layer in layers:
        vars(layer).update(flags, _gradient_checkpointing_func=functools.partial(run, layer))
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            for name in names:
                del vars(layer)[name]
            vars(layer).update(own)


@contextlib.contextmanager
def _evaluating(layer: nn.Module) -> Iterator[None]:
    """Compute a layer without dropout: transformers runs it in this way in train mode alone."""
    before, layer.training = layer.training, False
    try:
        yield
    finally:
        layer.training = before
