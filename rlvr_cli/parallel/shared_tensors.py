"""Tensors in memory that processes share: weights go from a trainer to its samplers without a copy for each."""

from collections.abc import Iterator, Mapping

import torch

from rlvr_cli.parallel.shared_memory import SharedMemory

_ALIGNMENT = 64  # bytes, of each tensor in the memory


class SharedTensors(SharedMemory):
    """Shared memory for tensors of which both processes know the sizes."""

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors into the memory."""
        self.grow(sum(_aligned(tensor) for tensor in tensors.values()))
        for tensor, place in zip(tensors.values(), self._places(tensors), strict=True):
            place.copy_(tensor.detach())
        self.writes += 1

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the memory into these tensors, in place: they must have the sizes and dtypes of those that were written."""
        for tensor, place in zip(tensors.values(), self._places(tensors), strict=True):
            tensor.copy_(place)

    def _places(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        mapped, offset = self.mapped(), 0
        for tensor in tensors.values():
            flat = torch.frombuffer(mapped, dtype=torch.uint8, count=tensor.nbytes, offset=offset)
            yield flat.view(tensor.dtype).view(tensor.shape)
            offset += _aligned(tensor)


def _aligned(tensor: torch.Tensor) -> int:
    return tensor.nbytes + -tensor.nbytes % _ALIGNMENT
