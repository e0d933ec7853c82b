"""Slices of a policy and of its optimizer's state: what a rank holds, and how both become whole and are divided again."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from peak import Peak
from policies import make_batch
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.training.checkpoints import load_checkpoint, save_checkpoint
from rlvr_cli.training.losses.objectives import policy_gradient
from rlvr_cli.training.losses.policy_gradient import LOSSES
from rlvr_cli.training.parallel.ranks import Ranks
from rlvr_cli.training.parallel.sharded_replica import open_replica
from together import Together

LENGTHS = [(3, 5), (3, 2), (2, 7), (4, 4), (4, 6), (1, 1)]
KINDS = {
    "adamw": {},
    "kahan": {"param_dtype": "bfloat16", "optimizer": "adamw_kahan"},
    "offloaded": {"param_dtype": "bfloat16", "offload_optimizer": True},
}


@pytest.fixture(scope="module")
def together(forked) -> Iterator[Together]:
    with Together(3) as together:
        yield together


def replica_of(ranks: Ranks, *, fsdp: bool = True, **options):
    return open_replica(GrpoConfig(trainers=ranks.size, fsdp=fsdp, **options), device="cpu", ranks=ranks)


def step(replica, seed: int) -> None:
    batch = make_batch(LENGTHS, seed)
    draw = torch.Generator().manual_seed(seed)
    old = torch.where(batch["response_mask"].bool(), -torch.rand(batch["labels"].shape, generator=draw), 0)
    advantages = torch.randn((len(LENGTHS), 1), generator=draw)
    loss = partial(policy_gradient, loss=LOSSES["reinforce_with_baseline"].function)
    batch |= {"advantages": advantages, "old_log_probs": old, "sampled_log_probs": old}
    replica.update(batch, learning_rate=1e-3, micro_batch_size=2, objective=loss)


def weights_of(replica) -> dict[str, torch.Tensor]:
    if not replica.is_whole:
        replica.gather(everywhere=True)
    return {name: tensor.detach().clone() for name, tensor in replica.policy.weights().items()}


def held(ranks: Ranks, kl_coef: float):
    """Bytes of weights, moments and a reference on this rank during an update; and of a whole policy."""
    replica = replica_of(ranks, kl_coef=kl_coef)
    whole = sum(p.nbytes for p in replica.policy.model.parameters())
    step(replica, 0)
    held = [replica._trained, *([replica._reference] if replica._reference else [])]
    shards = [p.to_local().nbytes for policy in held for p in policy.model.parameters()]
    moments = [t.nbytes for state in replica._stepped.state.values() for t in state.values()]
    shells = sum(p.untyped_storage().nbytes() for p in replica.policy.model.parameters())
    return sum(shards), sum(moments), shells, whole, replica.optimizer.state


@pytest.mark.parametrize("kl_coef", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_a_rank_holds_its_shard(together: Together, kl_coef: float):
    for shards, moments, shells, whole, state in together.call(held, kl_coef):
        share = whole / together.size
        assert shards == pytest.approx(share * (2 if kl_coef else 1), rel=0.05)
        assert moments == pytest.approx(2 * share, rel=0.05)
        assert shells < whole / 1000
        assert not state


def loaded(ranks: Ranks, kl_coef: float):
    """The most bytes at once while a replica loads, while rank 0's weights are divided again, and while a rank gets them whole."""
    peaks = []
    with Peak() as peak:
        replica = replica_of(ranks, kl_coef=kl_coef)
        peaks.append(peak.bytes)
        for divide in (replica.copy_rank_0, partial(replica.gather, everywhere=True)):
            peak.bytes = 0
            divide()
            peaks.append(peak.bytes)
    weights = [p.nbytes for p in replica.policy.model.parameters()]
    return peaks, sum(weights), max(weights)


@pytest.mark.parametrize("kl_coef", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_one_whole_policy_is_in_memory_at_a_time(together: Together, kl_coef: float):
    """Beside the shards, as the plan says of sampling: also while a reference is made. A weight that moves has copies of its own."""
    for (loading, *moving), whole, largest in together.call(loaded, kl_coef):
        held = whole + whole / together.size * (2 if kl_coef else 1)
        assert whole < loading < held + largest / 10
        assert all(whole < peak < held + 2.5 * largest for peak in moving)


def scored(ranks: Ranks):
    """Log-probabilities of the reference and the policy, before an update and after it."""
    replica, batch = replica_of(ranks, kl_coef=0.1), make_batch(LENGTHS, 5)
    found = []
    for seed in (0, 1):
        found.append([replica.scores(batch, of=of, micro_batch_size=2)["log_probs"] for of in ("reference", "policy")])
        step(replica, seed)
    return found


def test_the_reference_stays_what_the_policy_was(together: Together):
    for (reference, policy), (reference_after, policy_after) in together.call(scored):
        assert torch.equal(reference, policy)
        assert torch.equal(reference_after, reference)
        assert not torch.equal(policy_after, policy)


def before_and_after(ranks: Ranks, options, run: str):
    """Weights after two steps; those of a rank 0's checkpoint after the first one are divided again, for another second."""
    replica = replica_of(ranks, **options)
    step(replica, 0)
    replica.gather(everywhere=False)
    replica.gather_state()
    if ranks.rank == 0:
        save_checkpoint(Path(run), step=1, policy=replica.policy, optimizer=replica.optimizer, state={})
    step(replica, 1)

    resumed = replica_of(ranks, **options)
    if ranks.rank == 0:
        load_checkpoint(Path(run), policy=resumed.policy, optimizer=resumed.optimizer)
    resumed.copy_rank_0()
    assert not resumed.is_whole
    assert not resumed.optimizer.state
    step(resumed, 1)
    return weights_of(replica), weights_of(resumed)


def continued_whole(ranks: Ranks, options, run: str):
    """A second step of whole copies, after the first one of shards."""
    replica = replica_of(ranks, fsdp=False, **options)
    if ranks.rank == 0:
        load_checkpoint(Path(run), policy=replica.policy, optimizer=replica.optimizer)
    replica.copy_rank_0()
    step(replica, 1)
    return weights_of(replica)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_whole_and_is_divided_bit_for_bit(together: Together, tmp_path: Path, kind: str):
    found = together.call(before_and_after, KINDS[kind], str(tmp_path))
    for before, after in found:
        for name in before:
            assert torch.equal(before[name], found[0][0][name])
            assert torch.equal(after[name], before[name]), name
    for weights in together.call(continued_whole, KINDS[kind], str(tmp_path)):
        for name, tensor in weights.items():
            bound = 1e-5 if tensor.dtype == torch.float32 else 2**-7
            torch.testing.assert_close(tensor, found[0][0][name], rtol=bound, atol=bound / 10)


def gathered(ranks: Ranks):
    replica = replica_of(ranks)
    found = [(replica.is_whole, replica.gathers)]
    step(replica, 0)
    found.append((replica.is_whole, replica.gathers))
    replica.gather(everywhere=False)
    found.append((replica.is_whole, replica.gathers))
    replica.gather(everywhere=True)
    return [*found, (replica.is_whole, replica.gathers)]


def test_who_has_the_weights(together: Together):
    first, *others = together.call(gathered)
    assert first == [(True, 0), (False, 0), (True, 1), (True, 2)]
    assert others == [[(True, 0), (False, 0), (False, 1), (True, 2)]] * 2
