"""A policy that is divided over several processes: each holds a shard of every weight (PyTorch's FSDP2, `fully_shard`).

Enters: a whole policy in every process, and the mesh of these processes. Leaves: a `ShardedPolicy`, which computes what the whole
one does: the weights of a layer are put together when the layer computes. All processes must compute the same number of forward
and backward passes, at the same time.

The whole policy stays as a shell without weights (`empty`), until `ShardedPolicy.gather` fills it again.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.compute.onednn import LINEAR
from rlvr_cli.models.policy import Policy


class ShardedPolicy(Policy):
    """A policy of whose weights this process holds a shard, along the first dimension.

    Args:
        whole: a policy without an adapter, the same in all processes. It keeps its weights.
        mesh: of the processes, one-dimensional, on the policy's type of device.
    """

    def __init__(self, whole: Policy, mesh: DeviceMesh) -> None:
        _ = whole.packs_rows, whole.head()  # tested with the weights that it has, as for the copy below
        own = {id(parameter): parameter for parameter in whole.model.parameters()}
        model = copy.deepcopy(whole.model, own)  # of the modules, not of the parameters
        super().__init__(model, whole._tokenizer, compute_dtype=whole._compute_dtype)
        self.kernels = whole.kernels
        _ = self.packs_rows, self.head()
        self._mesh = mesh
        _shard(model, mesh, multiplied_in=None if self.compute_dtype == self.dtype else self.compute_dtype)
        # While a pass computes, the model has other parameters: whole ones.
        self._divided = {name: cast(DTensor, parameter) for name, parameter in model.named_parameters()}
        self._shards = {
            name: nn.Parameter(_local(parameter), requires_grad=parameter.requires_grad)
            for name, parameter in self._divided.items()
        }

    # Computation

    def in_one_forward(self, function: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Call a function that uses the model's weights as they are within its forward pass: whole."""
        run: Any = self.model
        results = run.within_forward(lambda: {name: tensor.clone() for name, tensor in function().items()})  # no views
        if not torch.is_grad_enabled():  # else the backward pass takes them apart again
            run.reshard()
        return results

    def rounded_weights(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: the weights of linear layers are rounded before they are put together."""
        return contextlib.nullcontext()

    # Weights

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return this process's shards of the parameters, by name; `take_gradients` moves their gradients here."""
        return {name: shard for name, shard in self._shards.items() if shard.requires_grad}

    def take_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Take the gradients of the last backward pass off the model: each shard of a parameter with that of its gradient.

        They are summed over the processes.
        """
        for name, parameter in self._divided.items():
            if parameter.grad is not None:
                gradient = _local(cast(DTensor, parameter.grad))
                parameter.grad = None
                yield self._shards[name], gradient

    @torch.no_grad()
    def gather(self, whole: Policy, *, keep: bool) -> None:
        """Fill the weights of the whole policy, in every process that keeps them; all must call this.

        One tensor after another is put together, so that a process that keeps none needs room for one.
        """
        shells = dict(whole.model.named_parameters())
        for name, parameter in self._divided.items():
            tensor = cast(Tensor, parameter.full_tensor())
            if keep:
                shells[name].data = tensor

    @torch.no_grad()
    def scatter(self, whole: Policy) -> None:
        """Take over the weights that the whole policy has in the first process; all must call this."""
        shells = dict(whole.model.named_parameters())
        for name in self._shards:
            self._shards[name].copy_(self.shard_of(shells[name].data))

    def shard_of(self, tensor: Tensor) -> Tensor:
        """Return this process's shard of a tensor of the first process, on the policy's device; all must call this.

        Args:
            tensor: in the other processes only its shape and its dtype matter.
        """
        first = self._mesh.get_local_rank() == 0
        whole = (
            tensor.to(self.device).contiguous()
            if first
            else torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        )
        return _local(distribute_tensor(whole, self._mesh, [Shard(0)]))

    def whole_of(self, shard: Tensor, shape: torch.Size) -> Tensor:
        """Return the tensor of this shape that the processes' shards make, on the policy's device; all must call this."""
        stride = torch.empty(shape, device="meta").stride()
        divided = DTensor.from_local(shard.to(self.device), self._mesh, [Shard(0)], shape=shape, stride=stride)
        return cast(Tensor, divided.full_tensor())


def check_shardable(whole: Policy) -> None:
    """Raise RlvrError if the model has no layers that can be divided one by one."""
    if not any(isinstance(module, GradientCheckpointingLayer) for module in whole.model.modules()):
        raise RlvrError(
            f"The layers of {type(whole.model).__name__} cannot be told apart, to divide them over trainers.",
            "Leave --fsdp out.",
        )


def empty(whole: Policy) -> None:
    """Free the memory of the weights. Their shapes stay, and whoever computes with them gets NaN."""
    for parameter in whole.model.parameters():
        parameter.data = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device).expand(
            parameter.shape
        )


def _shard(model: PreTrainedModel, mesh: DeviceMesh, *, multiplied_in: torch.dtype | None) -> None:
    """Divide a model: the linear layers of each of its layers are put together at once, all other weights for a whole pass.

    Gradients are summed over the processes (PyTorch's own default is their mean), in float32 or wider.

    Args:
        multiplied_in: the precision of matrix products, if it is not that of the weights. Linear layers are rounded to it, as in
            `rounded`; all else keeps its own.
    """
    wide = torch.promote_types(model.dtype, torch.float32)
    head = model.get_output_embeddings()
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        linear: list[nn.Module] = [
            module for module in layer.modules() if type(module) in LINEAR and module is not head
        ]
        if linear:
            fully_shard(linear, mesh=mesh, mp_policy=MixedPrecisionPolicy(multiplied_in, wide))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(None, wide, cast_forward_inputs=False))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # Some scores need weights of the root outside its own forward pass, as the head.
    run: Any = model
    run.within_forward = MethodType(lambda _, function: function(), model)
    register_fsdp_forward_method(model, "within_forward")


def _local(tensor: DTensor) -> Tensor:
    """This process's shard; it shares memory with the tensor."""
    return cast(DTensor, tensor.detach()).to_local()
