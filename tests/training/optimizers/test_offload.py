"""AdamW on the host: the result of AdamW where nothing is rounded, and state that no device holds."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fake_cuda import fake_cuda
from policies import make_batch, make_policy
from rlvr_cli.training.optimizers.offload import OffloadedAdamW
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.optimizers.optimizer_state import move_state, state_bytes
from rlvr_cli.training.updates.update import train_update

LENGTHS = [(3, 5), (2, 4), (4, 3)]


def updated(model, *, offload, steps=3, device=None):
    """The weights of the model after some updates, on the CPU, and the optimizer."""
    if device:
        model.to(device)
    optimizer = make_optimizer(model, learning_rate=0.01, weight_decay=0.1, offload=offload)
    for seed in range(steps):
        train_update(model, optimizer, make_batch(LENGTHS, seed=seed), learning_rate=0.01, micro_batch_size=2)
    return {name: p.detach().cpu() for name, p in model.named_parameters()}, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_result_is_that_of_adamw_bit_for_bit(dtype):
    model = make_policy(dtype)
    expected, _ = updated(copy.deepcopy(model), offload=False)
    found, optimizer = updated(copy.deepcopy(model), offload=True)
    assert isinstance(optimizer, OffloadedAdamW)
    assert all(found[name].equal(weight) for name, weight in expected.items())
    assert not any(weight.equal(model.state_dict()[name]) for name, weight in expected.items() if "bias" not in name)


@given(st.integers(1, 12), st.floats(1e-6, 1e-2), st.floats(0, 0.3))
def test_bfloat16_weights_are_those_of_float32_rounded(steps, lr, decay):
    """However small the steps are: none is lost."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(7, 3, generator=generator).bfloat16()
    weight, exact = (torch.nn.Parameter(start.to(dtype, copy=True)) for dtype in (torch.bfloat16, torch.float32))
    ours = OffloadedAdamW([weight], lr=lr, weight_decay=decay)
    plain = torch.optim.AdamW([exact], lr=lr, betas=(0.9, 0.95), weight_decay=decay, fused=True)
    for _ in range(steps):
        weight.grad = torch.randn(7, 3, generator=generator).bfloat16()
        exact.grad = weight.grad.float()
        ours.step()
        plain.step()
    assert weight.equal(exact.bfloat16())
    assert ours.state[weight]["weight"].equal(exact)


def test_a_parameter_without_a_gradient_stays():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = OffloadedAdamW([weight], lr=1.0)
    optimizer.step()
    assert weight.tolist() == [1, 1, 1]
    assert not optimizer.state[weight]


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_on_a_cuda_device_all_state_is_on_the_host(dtype):
    """The weights are those of AdamW on the device, the number of bytes there those of weights and gradients alone."""
    model = make_policy(dtype)
    with fake_cuda():
        expected, there = updated(copy.deepcopy(model), offload=False, device="cuda:1")
        found, optimizer = updated(model, offload=True, device="cuda:1")
        assert {str(p.device) for p in model.parameters()} == {"cuda:1"}
        assert {str(t.device) for state in there.state.values() for t in state.values()} == {"cuda:1"}
        for to_host in (True, False):  # as for an engine that needs the room
            move_state(optimizer, to_host=to_host)
        held = [tensor for state in optimizer.state.values() for tensor in state.values()]
        assert {(str(t.device), t.dtype) for t in held} == {("cpu", torch.float32)}
        assert sum(t.nbytes for t in held) == state_bytes(optimizer)
    count, tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    assert state_bytes(optimizer) == (8 if dtype == torch.float32 else 12) * count + 4 * tensors
    if dtype == torch.float32:
        assert all(found[name].equal(weight) for name, weight in expected.items())
    else:
        assert all((found[name] - weight).abs().max() <= 0.05 for name, weight in expected.items())
