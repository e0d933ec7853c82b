"""AdamW with the handout's defaults, and the learning-rate schedule."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policies import make_batch, make_policy
from rlvr_cli.training.optimizers.optimizer import learning_rate_at, make_optimizer
from rlvr_cli.training.updates.update import train_update


def test_the_optimizer_has_the_handouts_defaults_and_only_what_trains():
    model = make_policy(torch.float32)
    model.model.embed_tokens.weight.requires_grad_(False)  # the tied head with it
    optimizer = make_optimizer(model, learning_rate=3e-5)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (3e-5, (0.9, 0.95), 0.0)
    assert len(group["params"]) == sum(p.requires_grad for p in model.parameters())
    before = model.lm_head.weight.clone()
    metrics = train_update(model, optimizer, make_batch([(2, 3)]), learning_rate=0.1, micro_batch_size=1)
    assert metrics["optimizer/learning_rate"] == optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(model.lm_head.weight, before)
    assert metrics["optimizer/grad_norm"] > 0


def test_learning_rate_worked_by_hand():
    def rates(**options):
        return [learning_rate_at(step, peak=1.0, num_steps=7, **options) for step in range(9)]

    assert rates() == [1.0] * 9
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    expected = [0.5, 1.0, 1.0, 0.1 + 0.45 * (1 + math.cos(math.pi / 4)), 0.55]
    expected += [0.1 + 0.45 * (1 - math.cos(math.pi / 4)), 0.1, 0.1, 0.1]
    assert rates(warmup_steps=2, schedule="cosine") == pytest.approx(expected)
    skipping = [
        learning_rate_at(k, peak=1.0, num_steps=7, warmup_steps=2, schedule="cosine", trained=k - 3) for k in (3, 4, 6)
    ]
    assert skipping == pytest.approx(
        [0.5, 1.0, 0.1]
    )  # the first three were not made: the others warm up, and end where they would


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 600))
def test_learning_rate_stays_within_its_bounds(num_steps, warmup_steps, step):
    rate = learning_rate_at(step, peak=2.0, num_steps=num_steps, warmup_steps=warmup_steps, schedule="cosine")
    assert 0 < rate <= 2.0
    if step >= warmup_steps:
        assert rate >= 0.2 * (1 - 1e-12)
        later = learning_rate_at(step + 1, peak=2.0, num_steps=num_steps, warmup_steps=warmup_steps, schedule="cosine")
        assert later <= rate * (1 + 1e-12)
