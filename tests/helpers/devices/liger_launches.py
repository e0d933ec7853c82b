"""The kernels of liger-kernel and `fused_logits` on the emulated devices of `fake_cuda`, without Triton: they are counted, and compute nothing.

Import it before the devices are there: what liger-kernel imports looks for CUDA's own functions.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import liger_kernel.ops.rms_norm
import liger_kernel.ops.rope
import liger_kernel.ops.swiglu
import torch

from fake_cuda import FakeCuda, Work
from rlvr_cli.models.compute import fused_logits

_ops = liger_kernel.ops
_BOTH = {  # the places, among its tensors, of those that a kernel reads and writes; the others it reads or writes
    (_ops.rms_norm, "_rms_norm_forward_kernel"): (),
    (_ops.rms_norm, "_rms_norm_backward_kernel"): (),  # it gets the gradient twice
    (_ops.rope, "_triton_rope"): (0, 1),  # query and key
    (_ops.swiglu, "_swiglu_forward_kernel"): (),
    (_ops.swiglu, "_swiglu_backward_kernel"): (1, 2),  # what it gets becomes the gradients
    (fused_logits, "_statistics"): (),
    (fused_logits, "_gradient"): (),
}


class _Kernel:
    def __init__(self, cuda: FakeCuda, name: str, both: tuple[int, ...]) -> None:
        self.cuda, self.name, self.both = cuda, name, both

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *arguments: Any, **_: Any) -> None:
        tensors = [tensor for tensor in arguments if isinstance(tensor, torch.Tensor)]
        assert {str(tensor.device) for tensor in tensors} == {f"cuda:{self.cuda.current}"}, self.name
        moved = sum(tensor.nbytes for tensor in [*tensors, *(tensors[place] for place in self.both)])
        self.cuda.types[self.name].add(tuple(tensor.dtype for tensor in tensors))
        self.cuda.work.append(Work(self.name, moved, 0))


@contextmanager
def launches_counted(cuda: FakeCuda) -> Iterator[None]:
    """Count the kernels within the block instead of running them."""
    with ExitStack() as stack:
        for (module, name), places in _BOTH.items():
            stack.enter_context(patch.object(module, name, _Kernel(cuda, name, places)))
        yield
