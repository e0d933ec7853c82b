"""The gradient of an update: summed over its micro-batches and over the trainers, then clipped.

Enters: the loss of each micro-batch. Leaves: the gradient of each trainable parameter, in its `grad`, and the norms.
"""

from itertools import compress

import torch
from torch import Tensor

from rlvr_cli.models.policy import Policy
from rlvr_cli.models.sharded import ShardedPolicy
from rlvr_cli.training.parallel.ranks import Ranks


class Gradients:
    """The gradient of a policy that every rank has whole.

    Args:
        several: whether there are several micro-batches. Their gradients in half precision are then summed in float32: in
            bfloat16, 256 + 1 is 256.
    """

    def __init__(self, policy: Policy, ranks: Ranks, *, several: bool) -> None:
        self._groups = policy.parameter_groups()
        self._parameters = [parameter for group in self._groups for parameter in group]
        self._narrow = {p for p in self._parameters if p.dtype.itemsize < 4 and several}
        self._wide: dict[Tensor, Tensor] = {}
        self._ranks = ranks

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's loss.

        Each parameter's gradient moves to its float32 sum as soon as the backward pass has it. Moved after the whole pass, the
        gradients of all parameters would be in memory at once beside their sums.
        """

        def move(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._add(parameter, parameter.grad)
            parameter.grad = None

        hooks = [parameter.register_post_accumulate_grad_hook(move) for parameter in self._narrow]
        try:
            loss.backward()
        finally:
            for hook in hooks:
                hook.remove()

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        earlier = self._wide.get(parameter)
        self._wide[parameter] = gradient.float() if earlier is None else earlier.add_(gradient)

    def finish(self, *, max_norm: float) -> Tensor:
        """Put the sums into `grad`, in the precision of each parameter, each group of parameters scaled down to this norm.

        Returns:
            The norms before that, (groups,), see `Policy.parameter_groups`.
        """
        self._sum_over_ranks()
        self._round()
        norms = [self._norm(group) for group in self._groups]
        for group, norm in zip(self._groups, norms, strict=True):
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
        return torch.stack([norm.to(self._parameters[0].device) for norm in norms])

    def _norm(self, group: list[torch.nn.Parameter]) -> Tensor:
        return _norm([parameter.grad for parameter in group if parameter.grad is not None])

    def _round(self) -> None:
        for parameter in self._parameters:
            if parameter in self._wide:
                parameter.grad = self._wide.pop(parameter).to(parameter.dtype)

    def _sum_over_ranks(self) -> None:
        """Add up the gradients of all ranks. A parameter without a gradient on every rank has none afterwards."""
        if self._ranks.size == 1:
            return
        found = self._ranks.anywhere([p in self._wide or p.grad is not None for p in self._parameters])
        summed: list[Tensor] = []
        for parameter in compress(self._parameters, found):
            if parameter in self._narrow:
                summed.append(self._wide.setdefault(parameter, torch.zeros_like(parameter, dtype=torch.float32)))
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            summed.append(parameter.grad)
        self._ranks.sum(summed)


class ShardedGradients(Gradients):
    """The gradient of a policy of which every rank has a shard. The backward pass itself sums it over the ranks."""

    def __init__(self, policy: ShardedPolicy, ranks: Ranks, *, several: bool) -> None:
        super().__init__(policy, ranks, several=several)
        self._take = policy.take_gradients
        for _ in self._take():  # what an abandoned update left
            pass

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for parameter, gradient in self._take():
            if parameter in self._narrow:
                self._add(parameter, gradient)
            else:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def _sum_over_ranks(self) -> None:
        pass

    def _norm(self, group: list[torch.nn.Parameter]) -> Tensor:
        square = super()._norm(group).double() ** 2
        self._ranks.sum([square])
        return square.sqrt()


def _norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all gradients, from the norms of their rows.

    PyTorch on a CPU adds up a tensor's squares one after the other, in float32: the norm of 80 million is too small by 1e-3.
    """
    rows = [torch.linalg.vector_norm(g, dim=-1, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    return torch.nn.utils.get_total_norm(rows)


def gradients_of(policy: Policy, ranks: Ranks, *, several: bool) -> Gradients:
    """Return the empty sums of an update's gradients."""
    if isinstance(policy, ShardedPolicy):
        return ShardedGradients(policy, ranks, several=several)
    return Gradients(policy, ranks, several=several)
