"""Fused kernels of updates and scores: RMSNorm, rotary positions and SwiGLU by liger-kernel, an extra, and what follows from logits.

PyTorch computes each of these from several operators, which read and write the hidden states or the logits again and again. The
kernels compute the same in float32 within; results differ by rounding. Only one model's layers use them, only within a block: its
modules are as they were afterwards, and so are other models. Those for logits are in `fused_logits`.
"""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlvr_cli.errors import RlvrError, missing_extra
from rlvr_cli.models.compute import logits
from rlvr_cli.models.compute.device import add_product, as_operand, operand_dtype
from rlvr_cli.models.compute.logits import Toward, places

_PREFIXES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}  # of their classes, by model type
_BEFORE_PRODUCTS = ("input_layernorm", "post_attention_layernorm")  # the norms whose output several linear layers read
_PROBE = (3, 1, 4, 1, 5, 9)  # token ids


def resolve_kernels(model: PreTrainedModel, wanted: str, *, autocast: Callable[[], Any]) -> tuple[str, str]:
    """Decide whether a model uses the fused kernels, which is tried on a few tokens.

    Args:
        wanted: `auto` (where a CUDA device and the package are, and the model has layers that they know), `none`, or `liger`.
        autocast: makes the context in which the model computes.

    Returns:
        `liger` or `torch`; and with `auto` a note if a model on CUDA does not use the installed kernels, else the empty string.

    Raises:
        RlvrError: `liger` is asked for and cannot be used.
    """
    device = model.device
    if wanted == "liger":
        check_liger()
    if wanted == "none" or (wanted == "auto" and (device.type != "cuda" or not _installed())):
        return "torch", ""
    problem = _obstacle(model, device) or _problem(model, autocast)
    if not problem:
        return "liger", ""
    if wanted == "auto":
        return "torch", f"without fused kernels: {problem}"
    raise RlvrError(f"--fused-kernels liger: {problem}.", "Leave it out, or use --fused-kernels none.")


@contextlib.contextmanager
def fused_kernels(model: PreTrainedModel) -> Iterator[None]:
    """Let the model's layers compute with the fused kernels within the block, backward passes included."""
    layers = list(_fused(model))
    try:
        for module, forward in layers:
            vars(module)["forward"] = forward
        yield
    finally:
        for module, _ in layers:
            vars(module).pop("forward", None)


def check_liger() -> None:
    """Raise RlvrError if liger-kernel is not installed."""
    if not _installed():
        raise missing_extra("liger-kernel", "liger")


def _installed() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


def _obstacle(model: PreTrainedModel, device: torch.device) -> str:
    """Return why the kernels cannot compute this model's layers; empty if nothing is known to be in the way."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"they need a CUDA device, and the model is on {device.type}"
    if model.dtype == torch.float64:
        return "they do not compute in float64"
    kind = model.config.model_type
    prefix = _PREFIXES.get(kind, "?")
    if type(model).__name__ != f"{prefix}ForCausalLM":
        return f"they are for {', '.join(_PREFIXES)}, and the model is {type(model).__name__}"
    if getattr(model.config, "hidden_act", None) not in ("silu", "swish"):
        return "the model's activation is not SiLU"
    if any("forward" in vars(module) for module in model.modules()):
        return "the model's layers have been changed"
    return ""


def _fused(model: PreTrainedModel) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Iterate over the layers that the kernels compute, with what takes the place of their `forward`."""
    prefix = _PREFIXES[model.config.model_type]
    for name, module in model.named_modules():
        match type(module).__name__.removeprefix(prefix):
            case "RMSNorm":
                yield module, _norm(module, before_products=name.endswith(_BEFORE_PRODUCTS))
            case "MLP":
                yield module, _swiglu(module)
            case "Attention":
                yield module, _rotated(module)


def _norm(module: Any, *, before_products: bool) -> Callable[[Tensor], Tensor]:
    """Return RMSNorm; before several products under autocast, its output is rounded once for all of them."""
    from liger_kernel.ops import LigerRMSNormFunction

    def normed(hidden: Tensor) -> Tensor:
        # "llama": statistics in float32, the product with the weight in the precision of the input, as in transformers. The input's
        # gradient is written over the output's: in these models no one else reads that.
        out = LigerRMSNormFunction.apply(hidden, module.weight, module.variance_epsilon, 0.0, "llama", True)
        return out.to(operand_dtype(out)) if before_products else out

    return normed


def _swiglu(module: Any) -> Callable[[Tensor], Tensor]:
    from liger_kernel.ops import LigerSiLUMulFunction

    return lambda hidden: module.down_proj(LigerSiLUMulFunction.apply(module.gate_proj(hidden), module.up_proj(hidden)))


def _rotated(module: Any) -> Callable[..., Any]:
    """Return the module's own `forward` with another function for rotary positions, which it finds among its globals."""
    from liger_kernel.ops import LigerRopeFunction

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return LigerRopeFunction.apply(query, key, cos, sin)

    own = type(module).forward
    changed = FunctionType(
        own.__code__,
        own.__globals__ | {"apply_rotary_pos_emb": rotate},
        own.__name__,
        own.__defaults__,
        own.__closure__,
    )
    changed.__kwdefaults__ = own.__kwdefaults__
    return changed.__get__(module)


def _problem(model: PreTrainedModel, autocast: Callable[[], Any]) -> str:
    """Return why the kernels are not to be used, after they were tried on a few numbers; empty if they are."""
    try:
        return _difference(model, autocast) or _difference_of_logits(model.device) or _difference_of_sums(model.device)
    except Exception as error:  # of Triton, the compilers that it calls, their headers, or a driver
        return f"they fail here with {type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"


def _difference(model: PreTrainedModel, autocast: Callable[[], Any]) -> str:
    """Return what differs with the kernels on a few tokens, hidden states or gradients of norms; empty: nothing but rounding."""
    ids = torch.tensor([_PROBE], device=model.device)
    parameters = list(model.parameters())
    asked = [(parameter.requires_grad, parameter.grad) for parameter in parameters]
    embedded = model.get_input_embeddings()(ids).detach()
    norms = [parameter for name, parameter in model.named_parameters() if name.endswith("norm.weight")]
    vectors = [embedded, *norms]

    def computed() -> list[Tensor]:
        for vector in vectors:
            vector.requires_grad_().grad = None
        with torch.enable_grad(), autocast():
            hidden = model.base_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        weights = torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view(hidden.shape)
        with torch.enable_grad():
            (hidden.float() * weights).sum().backward()
        return [
            tensor.detach().float() for tensor in (hidden, *(vector.grad for vector in vectors)) if tensor is not None
        ]

    try:
        for parameter in parameters:  # no room is needed for the gradients of matrices
            parameter.requires_grad_(False)
        plain = computed()
        with fused_kernels(model):
            ours = computed()
    finally:
        for parameter, (requires_grad, gradient) in zip(parameters, asked, strict=True):
            parameter.requires_grad_(requires_grad).grad = gradient
    with autocast():
        rounds = torch.is_autocast_enabled(model.device.type) or model.dtype != torch.float32
    bound = 0.2 if rounds else 1e-3
    for number, (one, other) in enumerate(zip(plain, ours, strict=True)):
        if not bool((one - other).norm() <= bound * one.norm()):
            return (
                f"their {'gradients' if number else 'hidden states'} differ by more than rounding from those of PyTorch"
            )
    return ""


def _difference_of_logits(device: torch.device) -> str:
    """Return what differs with the kernels for logits; empty: nothing but rounding."""
    from rlvr_cli.models.compute import fused_logits

    z = 9 * torch.linspace(0, 900, 9000, device=device).sin().view(3, -1)
    label = places(torch.tensor([4, 2500, 3000], device=device), slice(0, z.shape[1]))

    def computed(passes: Any, **how: Any) -> list[Tensor]:
        shift, normalizer, entropy = passes.statistics(mine := z.clone(), with_entropy=True)
        toward = Toward(normalizer, (entropy, normalizer))
        grads = [
            passes.logits_gradient(mine, normalizer - shift, one, label, in_place=False, **how).float()
            for one in (toward, Toward(normalizer, None))
        ]
        return [normalizer, entropy, *grads]

    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        ours = computed(fused_logits, dtype=dtype)
        if not all((a - b).norm() <= bound * a.norm() for a, b in zip(computed(logits), ours, strict=True)):
            return "what they make of logits differs by more than rounding from what PyTorch does"
    return ""


def _difference_of_sums(device: torch.device) -> str:
    """Return what differs if products in half precision are added to a part of a gradient; empty: nothing but rounding."""
    a, b = (as_operand(torch.linspace(-1, 1, 64, device=device).view(16, 4), torch.bfloat16) for _ in range(2))
    total = torch.ones(8, 4, device=device)
    add_product(total[4:], a.T, b)
    expected = torch.cat((torch.zeros(4, 4, device=device), a.float().T @ b.float())) + 1
    same = (total - expected).abs().max() <= 1e-4
    return "" if same else "products are added to gradients with more than rounding"
