"""AdamW with Kahan summation: AdamW where nothing is rounded away, and still AdamW where bfloat16 would round it away."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.shared.optimization import rounds_beta2_away
from rlvr_cli.training.optimizers import adamw_kahan
from rlvr_cli.training.optimizers.adamw_kahan import AdamWKahan


def trained(start, gradients, make, *, dtype):
    weight = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = make([weight])
    for gradient in gradients:
        weight.grad = gradient.to(dtype)
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 12), st.floats(1e-5, 1e-2), st.floats(0, 0.3), st.sampled_from([(0.9, 0.95), (0.5, 0.999)]))
def test_in_float32_it_is_adamw(steps, lr, decay, betas):
    start, gradients = random(7, 3), random(steps, 7, 3, seed=1)
    ours, state = trained(
        start, gradients, lambda p: AdamWKahan(p, lr=lr, betas=betas, weight_decay=decay), dtype=torch.float32
    )
    theirs, _ = trained(
        start, gradients, lambda p: torch.optim.AdamW(p, lr=lr, betas=betas, weight_decay=decay), dtype=torch.float32
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert state["step"] == steps


def test_small_steps_by_hand():
    """With a gradient that stays 1 every step is lr, up to the rounding of the moments. Below 1 bfloat16 has 1 - 8 lr next."""
    lr = 2**-11
    start, gradients = torch.ones(1), torch.ones(16, 1)
    weight, state = trained(start, gradients, lambda p: AdamWKahan(p, lr=lr, eps=0.0), dtype=torch.bfloat16)
    assert float(weight) == 1 - 16 * lr
    assert abs(float(state["compensation"])) < lr / 10
    weight, state = trained(start, gradients[:11], lambda p: AdamWKahan(p, lr=lr, eps=0.0), dtype=torch.bfloat16)
    assert float(weight) == 1 - 8 * lr
    assert float(state["compensation"]) == pytest.approx(-3 * lr, rel=0.05)
    plain, _ = trained(
        start, gradients, lambda p: torch.optim.AdamW(p, lr=lr, eps=0.0, weight_decay=0), dtype=torch.bfloat16
    )
    assert float(plain) == 1


def test_weight_decay_is_not_lost_either():
    start, zero = torch.full((1,), 4.0), torch.zeros(64, 1)
    weight, _ = trained(start, zero, lambda p: AdamWKahan(p, lr=0.01, weight_decay=0.01), dtype=torch.bfloat16)
    assert float(weight) == pytest.approx(4 * (1 - 1e-4) ** 64, rel=2**-8)
    assert float(weight) < 4


def test_in_bfloat16_it_follows_float32_where_plain_adamw_stands_still():
    start, gradients = random(400).bfloat16().float(), (0.3 + random(200, 400, seed=2)).bfloat16().float()
    lr = 1e-5

    def moved(make, dtype):
        return trained(start, gradients, make, dtype=dtype)[0].float() - start

    exact = moved(lambda p: torch.optim.AdamW(p, lr=lr, betas=(0.9, 0.95), weight_decay=0.0), torch.float32)
    plain = moved(lambda p: torch.optim.AdamW(p, lr=lr, betas=(0.9, 0.95), weight_decay=0.0), torch.bfloat16)
    weight, state = trained(start, gradients, lambda p: AdamWKahan(p, lr=lr), dtype=torch.bfloat16)
    ours = weight.float() + state["compensation"].float() - start
    assert float((ours - exact).norm() / exact.norm()) < 0.02
    assert float((plain - exact).norm() / exact.norm()) > 0.5


def step_error(beta2):
    """By which share a step is off at most, of gradients from 1 to 2 that stay as they are: v has come to rest."""
    gradients = torch.linspace(1, 2, 257).bfloat16()
    _, state = trained(
        gradients, gradients.expand(600, -1), lambda p: AdamWKahan(p, lr=0.0, betas=(0.9, beta2)), dtype=torch.bfloat16
    )
    return float((gradients.float() / state["exp_avg_sq"].float().sqrt() - 1).abs().max()), state["exp_avg_sq"]


def test_the_highest_beta2_is_where_rounding_changes_steps_by_5_percent():
    """docs/algorithms.md has the second moments of the gradient 1."""
    config = GrpoConfig(param_dtype="bfloat16", optimizer="adamw_kahan")
    for beta2, of_one in {0.95: 0.961, 0.96: 0.953, 0.97: 0.938, 0.99: 0.805, 0.999: 0.25}.items():
        error, second = step_error(beta2)
        assert float(second[0]) == pytest.approx(of_one, abs=5e-4)
        assert (error > 0.05) == rounds_beta2_away(replace(config, adam_beta2=beta2))


def test_parts_of_a_parameter_are_updated_alike(monkeypatch):
    start, gradients = random(5, 7), random(3, 5, 7, seed=1)
    whole, _ = trained(start, gradients, lambda p: AdamWKahan(p, lr=0.01), dtype=torch.bfloat16)
    monkeypatch.setattr(adamw_kahan, "_CHUNK", 4)
    parts, _ = trained(start, gradients, lambda p: AdamWKahan(p, lr=0.01), dtype=torch.bfloat16)
    assert torch.equal(whole, parts)


def test_a_parameter_without_a_gradient_stays():
    weight, idle = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = AdamWKahan([weight, idle], lr=0.1)
    weight.grad = torch.ones(2)
    optimizer.step()
    assert idle not in optimizer.state
    assert torch.equal(idle.detach(), torch.ones(2))
    assert not torch.equal(weight.detach(), torch.ones(2))
