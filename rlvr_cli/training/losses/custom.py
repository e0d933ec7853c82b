"""A user's own loss: `path/to/file.py:function`, called as `function(inputs)` with a `LossInputs`.

It returns the loss to be minimized, (batch, seq) per token or (batch,) per row, or that and a dictionary of statistics of these
shapes, which become the metrics `policy/NAME_mean`:

    def my_loss(inputs):
        ratio = (inputs.log_probs - inputs.old_log_probs).exp()
        return -ratio * inputs.advantages, {"large": ratio.detach() > 2}

Enters: the specification. Leaves: a `Loss` that was tried on a tiny batch.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlvr_cli import user_code
from rlvr_cli.errors import RlvrError
from rlvr_cli.training.losses.inputs import LossInputs, LossOutputs
from rlvr_cli.training.losses.policy_gradient import Loss

LOSS = user_code.Role("loss", 1, "(inputs: LossInputs) -> Tensor | tuple[Tensor, dict[str, Tensor]]")
# What the objective (`objectives.policy_gradient`) itself says of every loss.
RESERVED = ("ratio", "mismatch", "position", "length", "importance_weight", "kl")
_RETURNS = "Return the loss, (batch, seq) or (batch,), or that and a dictionary of statistics of these shapes."


def load_loss(spec: str, *, with_reference: bool) -> Loss:
    """Run the file and try its function on a tiny batch: before the first update, and after.

    Args:
        spec: FILE.py:FUNCTION.
        with_reference: whether the run has reference log-probabilities.

    Raises:
        RlvrError: see `user_code.load`; or the function raises an exception, returns something else than a loss, one that is not
            finite, or one that does not depend on the log-probabilities. Names the file and line.
    """
    function = user_code.load(spec, LOSS)

    def loss(inputs: LossInputs) -> LossOutputs:
        try:
            returned = function(inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            at = user_code.location(spec, function, error=error)
            raise RlvrError(
                f"{at}: the loss raised {type(error).__name__}: {error}",
                "Correct it. What this run does not have is None, such as reference_log_probs without --kl-coef.",
            ) from error
        return _outputs(returned, inputs, at=user_code.location(spec, function))

    at = user_code.location(spec, function)
    first, later = (_try(loss, _tiny_batch(before, with_reference=with_reference), at=at) for before in (True, False))
    if first.loss.dim() != later.loss.dim():
        raise RlvrError(f"{at}: the loss is sometimes per token and sometimes per row.", _RETURNS)
    return Loss(loss, lambda: spec, per_row=first.loss.dim() == 1)


def _outputs(returned: Any, inputs: LossInputs, *, at: str) -> LossOutputs:
    """What a user's function returned as `LossOutputs`."""
    value, statistics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(value, Tensor) or not isinstance(statistics, dict):
        raise RlvrError(f"{at}: the loss returned a value of type {_types(returned)}.", _RETURNS)
    for name in statistics:
        if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise RlvrError(f"{at}: {name!r} is no name of a statistic.", "Use small letters, digits and underscores.")
        if name in RESERVED:
            raise RlvrError(
                f"{at}: rlvr has a statistic {name} of its own.", "Give yours another name, or leave it out."
            )
    batch, seq = inputs.log_probs.shape
    for name, tensor in {"the loss": value, **statistics}.items():
        if not isinstance(tensor, Tensor):
            raise RlvrError(f"{at}: {name} is a {type(tensor).__name__}, not a tensor.", _RETURNS)
        if tensor.shape not in ((batch, seq), (batch,)):
            raise RlvrError(
                f"{at}: {name} has shape {tuple(tensor.shape)}, where (batch, seq) is ({batch}, {seq}).", _RETURNS
            )
    return LossOutputs(value, statistics)


def _types(value: Any) -> str:
    """`float`, or `(Tensor, list)`."""
    names = [type(v).__name__ for v in value] if isinstance(value, tuple) else []
    return f"({', '.join(names)})" if names else type(value).__name__


def _try(loss: Callable[[LossInputs], LossOutputs], inputs: LossInputs, *, at: str) -> LossOutputs:
    """What the loss returns, once it is known to be finite and to have a finite gradient where there is a response."""
    outputs = loss(inputs)
    when = "before" if torch.equal(inputs.log_probs, inputs.old_log_probs) else "after"
    mask = inputs.response_mask if outputs.loss.dim() == 2 else inputs.response_mask.any(dim=1)
    if not outputs.loss[mask].isfinite().all():
        raise RlvrError(
            f"{at}: {when} the first update on a batch the loss is not finite.",
            "It was tried on log-probabilities from -3 to 0 and advantages of 1.5, -0.5 and 0.",
        )
    gradient = None
    if outputs.loss.requires_grad:
        (gradient,) = torch.autograd.grad(outputs.loss[mask].sum(), inputs.log_probs, allow_unused=True)
    if gradient is None:
        raise RlvrError(
            f"{at}: the loss has no gradient: it does not depend on inputs.log_probs.",
            "Compute it from inputs.log_probs by torch's operations, without detach(), item() or numpy().",
        )
    if not gradient[inputs.response_mask].isfinite().all():
        raise RlvrError(
            f"{at}: {when} the first update on a batch the gradient of the loss is not finite.",
            "Look for a root, a logarithm or a quotient at 0, also in the branch that torch.where does not take.",
        )
    return outputs


def _tiny_batch(first: bool, *, with_reference: bool) -> LossInputs:
    """Three responses of 4, 2 and 1 tokens, 0 outside as in a run; the first update's have a ratio of 1 everywhere."""
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 1, 0], [0, 1, 0, 0, 0]], dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)

    def values() -> Tensor:
        return torch.where(mask, torch.rand(mask.shape, generator=generator), 0.0)

    log_probs = -3 * values()
    return LossInputs(
        log_probs=log_probs.requires_grad_(),
        entropy=values().requires_grad_(),
        response_mask=mask,
        old_log_probs=log_probs.detach() if first else -3 * values(),
        advantages=torch.tensor([[1.5], [-0.5], [0.0]]),
        sampled_log_probs=-3 * values(),
        reference_log_probs=-3 * values() if with_reference else None,
        group=torch.tensor([0, 0, 1]),
    )
