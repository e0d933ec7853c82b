"""A user's own loss: `path/to/file.py:function`, called as `function(inputs)` with a `LossInputs`.

It returns the loss, (batch, seq) per token or (batch,) per row, or a tuple of the loss and a dictionary of statistics, which
have one of these shapes and become the metrics `policy/NAME_mean`:

    def my_loss(inputs):
        ratio = (inputs.log_probs - inputs.old_log_probs).exp()
        return -ratio * inputs.advantages, {"large": ratio.detach() > 2}

A preference loss (`rlvr dpo`) is called as `function(pairs)` with a `PairInputs`, and returns numbers of pairs, (pairs,):

    def my_loss(pairs):
        margin = (pairs.chosen - pairs.reference_chosen) - (pairs.rejected - pairs.reference_rejected)
        return (1 - 0.1 * margin).clamp(min=0)

Enters: the text FILE.py:FUNCTION. Leaves: a `Loss`, or an objective of pairs, that was tried on a tiny batch.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlvr_cli import user_code
from rlvr_cli.errors import RlvrError
from rlvr_cli.training.losses.inputs import LossInputs, LossOutputs
from rlvr_cli.training.losses.policy_gradient import Loss
from rlvr_cli.training.losses.preference import outputs_of_pairs, pair_inputs

PREFERENCE = user_code.Role("preference loss", 1, "(pairs: PairInputs) -> Tensor | tuple[Tensor, dict[str, Tensor]]")
LOSS = user_code.Role("loss", 1, "(inputs: LossInputs) -> Tensor | tuple[Tensor, dict[str, Tensor]]")
# Statistics that the objective (`objectives.policy_gradient`) adds to those of every loss.
RESERVED = ("ratio", "mismatch", "position", "length", "early", "stale", "importance_weight", "kl")
RESERVED_OF_PAIRS = ("chosen_log_ratio", "rejected_log_ratio", "margin", "accuracy")
_RETURNS_OF_PAIRS = "Return the loss, (pairs,), or a tuple: loss, dictionary of statistics of this shape."
_RETURNS = "Return the loss, (batch, seq) or (batch,), or a tuple: loss, dictionary of statistics of these shapes."


def load_loss(spec: str, *, with_reference: bool, with_stale: bool = False, per_token: bool = False) -> Loss:
    """Load a user's loss, and try it on a tiny batch, as in the first update and as in a later one.

    Args:
        spec: FILE.py:FUNCTION.
        with_reference: whether the run has reference log-probabilities.
        with_stale: whether the run tells which tokens an earlier policy sampled.
        per_token: whether each token has an advantage of its own.

    Raises:
        RlvrError: see `user_code.load`; or the function raises an exception, or its return value is not a loss, is not finite,
            or does not depend on the log-probabilities. Names the file and line.
    """
    loss = UserLoss(spec)
    at = loss.location()
    given = {"with_reference": with_reference, "with_stale": with_stale, "per_token": per_token}
    first, later = (_try(loss, _tiny_batch(before, **given), at=at) for before in (True, False))
    if first.loss.dim() != later.loss.dim():
        raise RlvrError(f"{at}: the loss is sometimes per token and sometimes per row.", _RETURNS)
    return Loss(loss, lambda: spec, per_row=first.loss.dim() == 1, uses_ratio=None)


class UserLoss:
    """A user's loss, whose errors name its file and line. Another process loads the file again (it is pickled as its name)."""

    role = LOSS

    def __init__(self, spec: str) -> None:
        self._spec, self._function = spec, user_code.load(spec, self.role)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self._spec,)

    def location(self, *, error: BaseException | None = None) -> str:
        """FILE:LINE of the error, else of the function."""
        return user_code.location(self._spec, self._function, error=error)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        hint = (
            "Correct it. Inputs that this run does not have are None: reference_log_probs without --kl-coef, stale without "
            "--partial-rollout-tokens."
        )
        returned = self._called(inputs, hint=hint)
        batch, seq = inputs.log_probs.shape
        shapes = {"(batch, seq)": (batch, seq), "(batch,)": (batch,)}
        return LossOutputs(*_checked(returned, shapes, at=self.location(), reserved=RESERVED, returns=_RETURNS))

    def _called(self, argument: Any, *, hint: str) -> Any:
        try:
            return self._function(argument)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise RlvrError(
                f"{self.location(error=error)}: the loss raised {type(error).__name__}: {error}", hint
            ) from error


class UserPreferenceLoss(UserLoss):
    """A user's preference loss, an objective of `rlvr dpo`."""

    role = PREFERENCE

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        pairs = pair_inputs(inputs)
        returned = self._called(pairs, hint="Correct it.")
        shapes = {"(pairs,)": tuple(pairs.chosen.shape)}
        at = self.location()
        loss, statistics = _checked(returned, shapes, at=at, reserved=RESERVED_OF_PAIRS, returns=_RETURNS_OF_PAIRS)
        chosen, rejected = pairs.chosen - pairs.reference_chosen, pairs.rejected - pairs.reference_rejected
        return outputs_of_pairs(loss, chosen=chosen, rejected=rejected, margin=chosen - rejected, **statistics)


def load_preference_loss(spec: str) -> UserPreferenceLoss:
    """Load a user's preference loss, and try it on three pairs, as in the first update and as in a later one.

    Raises:
        RlvrError: as `load_loss`.
    """
    loss = UserPreferenceLoss(spec)
    for first in (True, False):
        _try(loss, _tiny_pairs(first), at=loss.location())
    return loss


def loss_facts(spec: str) -> dict[str, Any]:
    """The facts that identify a user's own loss in run.json, so that a changed file counts as another loss."""
    return {"loss": {"name": spec, "sha256": user_code.sha256(spec)}}


def _checked(
    returned: Any, shapes: Mapping[str, tuple[int, ...]], *, at: str, reserved: Sequence[str], returns: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Check a user function's return value: the loss and the statistics, of one of these shapes by name."""
    value, statistics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(value, Tensor) or not isinstance(statistics, dict):
        raise RlvrError(f"{at}: the loss returned a value of type {_types(returned)}.", returns)
    for name in statistics:
        if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise RlvrError(
                f"{at}: {name!r} is not a valid name of a statistic.", "Use lowercase letters, digits and underscores."
            )
        if name in reserved:
            raise RlvrError(f"{at}: rlvr itself has a statistic {name}.", "Give yours another name, or leave it out.")
    for name, tensor in {"the loss": value, **statistics}.items():
        if not isinstance(tensor, Tensor):
            raise RlvrError(f"{at}: {name} is a {type(tensor).__name__}, not a tensor.", returns)
        if tensor.shape not in shapes.values():
            what, shape = next(iter(shapes.items()))
            raise RlvrError(f"{at}: {name} has shape {tuple(tensor.shape)}, where {what} is {shape}.", returns)
    return value, statistics


def _types(value: Any) -> str:
    """The type of a returned value as text, such as `float` or `(Tensor, list)`."""
    names = [type(v).__name__ for v in value] if isinstance(value, tuple) else []
    return f"({', '.join(names)})" if names else type(value).__name__


def _try(loss: Callable[[LossInputs], LossOutputs], inputs: LossInputs, *, at: str) -> LossOutputs:
    """Call the loss, and check that it and its gradient are finite on the response tokens."""
    outputs = loss(inputs)
    when = "before" if torch.equal(inputs.log_probs, inputs.old_log_probs) else "after"
    mask = inputs.response_mask if outputs.loss.dim() == 2 else inputs.response_mask.any(dim=1)
    if not outputs.loss[mask].isfinite().all():
        raise RlvrError(
            f"{at}: the loss is not finite {when} the first update on a batch.",
            "It was tried on log-probabilities from -3 to 0 and advantages of 1.5, -0.5 and 0."
            if inputs.advantages is not None
            else "It was tried on three pairs, of responses with log-probabilities of -12 to 0.",
        )
    gradient = None
    if outputs.loss.requires_grad:
        (gradient,) = torch.autograd.grad(outputs.loss[mask].sum(), inputs.log_probs, allow_unused=True)
    if gradient is None:
        raise RlvrError(
            f"{at}: the loss has no gradient: it does not depend on the policy's log-probabilities.",
            "Compute it by torch's operations, without detach(), item() or numpy().",
        )
    if not gradient[inputs.response_mask].isfinite().all():
        raise RlvrError(
            f"{at}: the gradient of the loss is not finite {when} the first update on a batch.",
            "Look for a root, logarithm or quotient at 0, including the branch that torch.where does not select.",
        )
    return outputs


def _tiny_batch(first: bool, *, with_reference: bool, with_stale: bool, per_token: bool) -> LossInputs:
    """Three responses of 4, 2 and 1 tokens; values are 0 outside them, as in a run. With `first`, all ratios are 1."""
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 1, 0], [0, 1, 0, 0, 0]], dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)

    def values() -> Tensor:
        return torch.where(mask, torch.rand(mask.shape, generator=generator), 0.0)

    log_probs = -3 * values()
    advantages = torch.tensor([[1.5], [-0.5], [0.0]])
    return LossInputs(
        log_probs=log_probs.requires_grad_(),
        entropy=values().requires_grad_(),
        response_mask=mask,
        old_log_probs=log_probs.detach() if first else -3 * values(),
        advantages=torch.where(mask, advantages, 0.0) if per_token else advantages,
        sampled_log_probs=-3 * values(),
        stale=mask & (torch.arange(mask.shape[1]) < 3) if with_stale else None,
        reference_log_probs=-3 * values() if with_reference else None,
        group=torch.tensor([0, 0, 1]),
    )


def _tiny_pairs(first: bool) -> LossInputs:
    """Three pairs of responses of 1 to 4 tokens. With `first`, the policy is still the reference."""
    mask = torch.arange(4) < torch.tensor([[4], [2], [1], [1], [3], [4]])
    generator = torch.Generator().manual_seed(0)
    log_probs, others = (torch.where(mask, -3 * torch.rand(mask.shape, generator=generator), 0.0) for _ in range(2))
    before = log_probs if first else others
    return LossInputs(
        log_probs=log_probs.clone().requires_grad_(),
        entropy=torch.zeros(mask.shape),
        response_mask=mask,
        old_log_probs=before,
        reference_log_probs=before,
    )
