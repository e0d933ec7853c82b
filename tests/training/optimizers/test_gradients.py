"""The gradient of an update."""

import math

import pytest
import torch

from policies import make_policy
from rlvr_cli.models.policy import Policy
from rlvr_cli.training.optimizers.gradients import gradients_of
from rlvr_cli.training.parallel.ranks import Ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_millions_of_numbers_is_exact(dtype):
    """PyTorch's own is too small by 4e-4 here."""
    policy = Policy(make_policy(dtype=dtype, vocab_size=1_000_000))
    gradients = gradients_of(policy, Ranks(), several=False)
    for parameter in policy.trainable_parameters().values():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in policy.trainable_parameters().values()))
    assert float(gradients.finish(max_norm=1.0)) == pytest.approx(exact, rel=1e-6)
