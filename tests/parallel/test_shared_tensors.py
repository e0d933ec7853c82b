"""Tensors in shared memory: the bits that were written are read."""

import os

import torch

from rlvr_cli.parallel.shared_tensors import SharedTensors


def test_shared_tensors_arrive_bit_for_bit_and_the_memory_grows():
    """Odd sizes, other precisions, a scalar, a view that is not contiguous; then more of them, and fewer."""
    few = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.tensor(2.5, dtype=torch.float64)}
    many = few | {"d": torch.randn(64, 33).T, "e": torch.arange(5)}
    here = SharedTensors()
    there = SharedTensors(os.dup(here.descriptor))
    for written in (few, many, few):
        here.write(written)
        received = {name: torch.zeros_like(tensor) for name, tensor in written.items()}
        there.read(received)
        assert all(torch.equal(received[name], tensor) for name, tensor in written.items())
    here.close()
    here.close()
    received = {name: torch.zeros_like(tensor) for name, tensor in few.items()}
    there.read(received)
    assert torch.equal(received["a"], few["a"])
    there.close()
