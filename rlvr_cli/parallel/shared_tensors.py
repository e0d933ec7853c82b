"""Tensors in memory that processes share: weights go from a trainer to its samplers without a copy for each."""

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping

import torch

_ALIGNMENT = 64  # bytes, of each tensor in the memory


class SharedTensors:
    """Memory that two processes map, for tensors of which both know the sizes; it grows with what is written.

    Args:
        descriptor: of the memory, inherited from the process that made it; None: make it.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is not None:
            self.descriptor = descriptor
        elif hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("rlvr-weights")
        else:  # not on Linux
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        self._map: mmap.mmap | None = None

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors into the memory."""
        size = sum(_aligned(tensor) for tensor in tensors.values())
        if os.fstat(self.descriptor).st_size < size:
            os.ftruncate(self.descriptor, size)
        for tensor, place in zip(tensors.values(), self._places(tensors), strict=True):
            place.copy_(tensor.detach())

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the memory into these tensors, in place: they must have the sizes and dtypes of those that were written."""
        for tensor, place in zip(tensors.values(), self._places(tensors), strict=True):
            tensor.copy_(place)

    def _places(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        size = os.fstat(self.descriptor).st_size
        if self._map is None or len(self._map) != size:
            self._map = mmap.mmap(self.descriptor, size)
        offset = 0
        for tensor in tensors.values():
            flat = torch.frombuffer(self._map, dtype=torch.uint8, count=tensor.nbytes, offset=offset)
            yield flat.view(tensor.dtype).view(tensor.shape)
            offset += _aligned(tensor)

    def close(self) -> None:
        """Give this process's share of the memory back; closing twice is allowed."""
        self._map = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _aligned(tensor: torch.Tensor) -> int:
    return tensor.nbytes + -tensor.nbytes % _ALIGNMENT
