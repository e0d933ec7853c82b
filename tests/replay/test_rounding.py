"""A nudged replay has the rounding that training has, so that no honest run is accused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rlvr_cli.commands import grpo
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.models.load import load_policy
from rlvr_cli.replay.run import GAP, ROUNDING, TOLERANCE, _nudged, _replay, allowing, replay_run
from rlvr_cli.replay.stored import StoredRun, read_stored

pytestmark = pytest.mark.usefixtures("read_once")


def trained(
    folder: Path, *, steps: int, batch: int, learning_rate: float = 1e-3, seed: int = 2, **options: Any
) -> StoredRun:
    """A run of the built-in model at a learning rate at which rounding grows."""
    grpo.run(
        GrpoConfig(
            dataset="arithmetic:64", n_grpo_steps=steps, rollout_batch_size=batch, train_batch_size=batch,
            gradient_accumulation_steps=1, learning_rate=learning_rate, eval_every=0, seed=seed, run="r", runs_dir=str(folder),
            **{"group_size": 8, "sampling_max_tokens": 32, "eval_examples": 1, **options},
        )
    )  # fmt: skip
    return read_stored(folder / "r")


def test_a_nudge_is_the_last_bit_of_each_weight_and_is_taken_back(tiny_model_dir):
    policy = load_policy(tiny_model_dir, dtype="float32", device="cpu")
    before = {name: weight.detach().clone() for name, weight in policy.weights().items()}
    with _nudged(policy, torch.Generator().manual_seed(0)):
        moved = torch.cat([(w / before[name] - 1)[before[name] != 0].flatten() for name, w in policy.weights().items()])
        assert ((moved.abs() - 2**-23).abs() <= 2**-24).all()
        assert float((moved > 0).float().mean()) == pytest.approx(0.5, abs=0.05)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.weights().items())


def test_nudged_replays_move_the_gradients_that_rounding_moves(tmp_path):
    """Of a token that is nearly certain, 1 - p is far from what it is in float64; in a group these terms cancel, and their errors stay."""
    gradients: list[Tensor] = []

    def remember(optimizer, *_) -> None:
        of_all = [p.grad for group in optimizer.param_groups for p in group["params"]]
        gradients.append(torch.cat([gradient.flatten() for gradient in of_all]).double())

    hook = register_optimizer_step_pre_hook(remember)
    try:
        stored = trained(tmp_path, steps=1, batch=16)
        kept: dict[str, dict[str, Tensor]] = {}
        replay = _replay(stored, wanted=1, kept=kept)
        twin = _replay(stored, wanted=1, nudged_from=kept)
    finally:
        hook.remove()
    run, replayed, nudged = gradients
    off, moved = (run - replayed).abs(), (nudged - replayed).abs()
    farthest = (off / (replayed.abs() + 1e-8)).topk(20).indices  # those that move AdamW's first step most
    assert float((off / moved)[farthest].quantile(0.9)) < 2
    assert 0 == twin.gaps[0] < twin.gaps[1]  # the log-probabilities are as far apart as these two replays
    far = replace(replay, gaps=[0.0, 5.0])
    allowed = allowing(far, replace(twin, gaps=[0.0, 1.0]))
    assert [any("log-probability" in said for said in found.problems) for found in (far, allowed)] == [True, False]


@pytest.mark.slow
def test_a_run_whose_rounding_grows_is_not_accused(tmp_path):
    found = replay_run(trained(tmp_path, steps=8, batch=32), most=None)
    assert (found.problems, found.difference > TOLERANCE) == ([], True)


@pytest.mark.slow
def test_a_run_whose_gradient_is_rounding_is_not_accused(tmp_path):
    """Equal responses with other rewards: their terms cancel, and AdamW makes steps of what rounding leaves."""
    (tmp_path / "coin.py").write_text(
        "import itertools\ncalls = itertools.count()\n"
        "def grade(response, truth):\n    return {'reward': float(next(calls) % 2)}\n"
    )
    sampling = {"group_size": 2, "sampling_max_tokens": 3, "sampling_min_tokens": 1, "sampling_temperature": 0.3}
    grader = {"grader": f"{tmp_path}/coin.py:grade", "grader_workers": 1}
    found = replay_run(trained(tmp_path, steps=1, batch=2, eval_examples=4, **sampling, **grader), most=None)
    assert (found.problems, found.gaps[1] > GAP) == ([], True)


@pytest.mark.slow
def test_a_run_at_a_learning_rate_that_destroys_its_policy_is_not_accused(tmp_path):
    """One nudged replay is as far away as the run, not a thirtieth: it rounds the normalizer where training does."""
    stored = trained(tmp_path, steps=2, batch=32, learning_rate=3e-3, seed=1)
    replay, nudged = _replay(stored, wanted=2), _replay(stored, wanted=2, nudged_from={})
    allowed = allowing(replay, nudged).updates[1].allowed / ROUNDING
    assert TOLERANCE < replay.updates[1].difference < 3 * allowed
