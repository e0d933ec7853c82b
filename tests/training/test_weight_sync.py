"""The weights that lag behind with --async-steps are a copy, and loading them for the sampler leaves the policy as it was."""

import pytest
import torch

from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.models.policy import Policy, distinct_tensors
from rlvr_cli.training.weight_sync import Snapshot, WeightSync


@pytest.fixture
def policy(tiny_model, tiny_tokenizer):
    return Policy(tiny_model, tiny_tokenizer)


def weights_of(policy):
    return {name: tensor.detach().clone() for name, tensor in distinct_tensors(policy.weights()).items()}


def same(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def train(policy):
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter.add_(1e-3)


def test_a_snapshot_stays_while_the_policy_is_trained(policy):
    sync = WeightSync(GrpoConfig(), engine="transformers")
    sync.attach(policy)
    before = weights_of(policy)
    sync.snapshot_policy(3)
    train(policy)
    assert sync.snapshot is not None
    assert sync.snapshot.version == 3
    assert same(sync.snapshot.weights, before)
    assert same(Snapshot.from_tensors(sync.snapshot.tensors, version=3).weights, before)


def test_a_loaded_snapshot_gives_the_policy_back(policy):
    lagging = Snapshot(0, weights_of(policy))
    train(policy)
    current = weights_of(policy)
    with lagging.loaded_into(policy):
        assert same(weights_of(policy), lagging.weights)
    assert same(weights_of(policy), current)
    with pytest.raises(KeyError), lagging.loaded_into(policy):
        raise KeyError
    assert same(weights_of(policy), current), "after an error, too"
