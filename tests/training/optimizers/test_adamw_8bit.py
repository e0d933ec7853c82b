"""AdamW with 8-bit moments: bitsandbytes' own where weights are float32, and no step lost where they are bfloat16."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_cuda import fake_cuda
from rlvr_cli.training.optimizers import adamw_8bit
from rlvr_cli.training.optimizers.adamw_8bit import SMALLEST, AdamW8bit
from rlvr_cli.training.optimizers.optimizer_state import move_state, state_bytes

SHAPES = [(70, 300), (SMALLEST,), (SMALLEST - 1,), (7,)]  # the first ends within a block


def draw(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def trained(make, *, steps, dtype=torch.float32, device="cpu"):
    """The weights after some steps, on the CPU, and the optimizer."""
    weights = [torch.nn.Parameter(start.to(device)) for start in draw(0, dtype)]
    optimizer = make(weights)
    for step in range(steps):
        for weight, gradient in zip(weights, draw(step + 1, dtype), strict=True):
            weight.grad = gradient.to(device)
        optimizer.step()
    return [weight.detach().cpu() for weight in weights], optimizer


@settings(max_examples=10)
@given(st.integers(1, 4), st.floats(1e-5, 1e-2), st.floats(0, 0.3), st.sampled_from([(0.9, 0.95), (0.5, 0.999)]))
def test_in_float32_it_is_that_of_bitsandbytes(steps, lr, decay, betas):
    import bitsandbytes as bnb

    options = {"lr": lr, "betas": betas, "weight_decay": decay}
    ours, optimizer = trained(lambda p: AdamW8bit(p, **options), steps=steps)
    theirs, _ = trained(lambda p: bnb.optim.AdamW8bit(p, **options), steps=steps)
    assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))
    precisions = [state["exp_avg"].dtype for state in optimizer.state.values()]
    assert precisions == [torch.uint8, torch.uint8, torch.float32, torch.float32]
    assert state_bytes(optimizer) == 2 * (21000 + 4096) + 8 * (83 + 16) + 8 * (4095 + 7) + 4 * 4


@pytest.mark.parametrize("chunk", [2**24, 512])
def test_in_bfloat16_no_small_step_is_lost(chunk, monkeypatch):
    """Weight and compensation together follow float32 weights, where rounded weights would stand still."""
    monkeypatch.setattr(adamw_8bit, "_CHUNK", chunk)
    rounded, optimizer = trained(lambda p: AdamW8bit(p, lr=1e-5), steps=60, dtype=torch.bfloat16)
    start = [weight.float() for weight in draw(0, torch.bfloat16)]
    exact = [torch.nn.Parameter(weight.clone()) for weight in start]
    plain = AdamW8bit(exact, lr=1e-5)
    for step in range(60):
        for weight, gradient in zip(exact, draw(step + 1, torch.bfloat16), strict=True):
            weight.grad = gradient.float()
        plain.step()
    for weight, state, wide, before in zip(rounded, optimizer.state.values(), exact, start, strict=True):
        moved, wanted = weight.float() + state["compensation"].float() - before, wide.detach() - before
        assert (moved - wanted).norm() < 0.05 * wanted.norm()
        assert (weight.float() - before).norm() < 2 * wanted.norm()


def test_on_a_cuda_device_the_state_is_there_and_moves_to_the_host_and_back():
    expected, _ = trained(lambda p: AdamW8bit(p, lr=0.01), steps=3)
    with fake_cuda():
        found, optimizer = trained(lambda p: AdamW8bit(p, lr=0.01), steps=3, device="cuda:1")
        for to_host, where in ((True, "cpu"), (False, "cuda:1")):
            move_state(optimizer, to_host=to_host)
            held = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
            assert {str(tensor.device) for tensor in held} == {where}
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
