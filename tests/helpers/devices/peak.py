"""How much memory a piece of code has at once, counted by the tensors that its operations see."""

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class Peak(TorchDispatchMode):
    """The most bytes of storages that are alive at the same time; FSDP frees some by making them smaller.

    Args:
        kind: of the tensors that count.
    """

    def __init__(self, kind: type[torch.Tensor] = torch.Tensor) -> None:
        super().__init__()
        self.bytes = 0
        self._kind = kind
        self._alive: Any = WeakIdKeyDictionary(ref_type=weakref.ref)

    def see(self, *values: Any) -> None:
        for value in tree_leaves(values):
            tensor = value.to_local() if isinstance(value, DTensor) else value
            if isinstance(tensor, self._kind) and tensor.device.type != "meta":
                self._alive[tensor.untyped_storage()] = None
        self.bytes = max(self.bytes, sum(storage.nbytes() for storage in list(self._alive)))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.see(args, out)
        return out
