"""Credit of turns, worked by hand; which tokens of a batch it reaches; and that one turn an episode is as no turns."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import a_rollout, an_episode
from rlvr_cli.commands.grpo import credit
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.replay import formulas
from rlvr_cli.runs.readers import read_rollouts
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.parquet import to_rollouts
from rlvr_cli.training.credit.advantages import group_advantages
from rlvr_cli.training.credit.groups import group_metrics, groups_with_signal
from rlvr_cli.training.credit.turns import turn_advantages, turn_returns
from rlvr_cli.training.losses.chosen import policy_gradient_loss
from rlvr_cli.training.losses.policy_gradient import LOSSES
from rlvr_cli.training.planning.plan import advantage_formula
from rlvr_cli.training.updates.tensors import rollout_tensors, zero_advantage_rows

EXACT = {"advantage_eps": 0.0, "normalize_by_std": True}
CENTERED = {"advantage_eps": 0.0, "normalize_by_std": False}
PLAYED = {"environment": "calculator", "credit": "turn"}


def credited(rollouts, **given):
    config = GrpoConfig(**{**PLAYED, "group_size": len(rollouts), "advantage_eps": 0.0, **given})
    return credit(config, rollouts, loss=LOSSES["reinforce_with_baseline"], number=0)


def pair(**changes):
    """Two episodes of 4 + 2 tokens of the policy with 3 of the environment between, whose turns are rewarded 0, 1 and 1, 0."""
    return [an_episode(4, 3, 2, turn_rewards=rewards, **changes) for rewards in ((0.0, 1.0), (1.0, 0.0))]


# --- worked numbers


def test_rewards_from_a_turn_on():
    assert [turn_returns(r) for r in pair()] == [[1, 1], [1, 0]]
    assert turn_returns(an_episode(1, 1, 1, 1, 1, turn_rewards=(0.5, None, 0.25))) == [0.75, 0.25, 0.25]
    assert turn_returns(an_episode(1, 1, 1, turn_rewards=(0.5, 0.25)), terms=(-0.25, -0.25)) == [0.25, -0.25]


def test_a_graders_reward_is_that_of_the_last_turn():
    assert turn_returns(an_episode(1, 1, 1, 1, 1, reward=0.5)) == [0.5, 0.5, 0.5]
    assert turn_returns(a_rollout(reward=0.5)) == [0.5]
    judged = an_episode(1, 1, 1, turn_rewards=(1.0, 1.0), grader="r1_zero", reward=0.5)
    assert turn_returns(judged) == [0.5, 0.5], "the environment's rewards are then a remark"
    assert turn_returns(an_episode(1, 1, 1, turn_rewards=(1.0, None), reward=None)) == [0.0, 0.0]
    assert turn_returns(an_episode(1, 1, 1, grader="environment", reward=0.0)) == [0.0, 0.0]


def test_turns_are_compared_with_those_of_the_same_number():
    returns = [turn_returns(r) for r in pair()]
    assert turn_advantages(returns, group_size=2, **CENTERED) == [[0, 0.5], [0, -0.5]]
    root = math.sqrt(0.5)
    assert turn_advantages(returns, group_size=2, **EXACT) == [[0, pytest.approx(root)], [0, pytest.approx(-root)]]
    with_eps = turn_advantages(returns, group_size=2, advantage_eps=0.5, normalize_by_std=True)
    assert with_eps[0] == [0, pytest.approx(0.5 / (root + 0.5))]


def test_a_turn_that_no_other_episode_has_reached_has_no_advantage():
    found = turn_advantages([[1.0], [0.0, 0.0], [0.0, 1.0, 7.0]], group_size=3, **EXACT)
    root = math.sqrt(0.5)  # the second turns of two episodes: 0 and 1
    assert found[1] == [pytest.approx(-1 / 3 / math.sqrt(1 / 3)), pytest.approx(-root)]
    assert found[2] == [pytest.approx(-1 / 3 / math.sqrt(1 / 3)), pytest.approx(root), 0.0]
    assert len(found[0]) == 1


def test_groups_do_not_mix():
    two = turn_advantages([[1.0, 1.0], [0.0, 0.0], [5.0, 5.0], [5.0, 9.0]], group_size=2, **CENTERED)
    assert two == [[0.5, 0.5], [-0.5, -0.5], [0, -2], [0, 2]]


def test_a_group_of_four_episodes():
    """Rewards 1, 0, 0, 1: each episode's advantage on the tokens of the policy alone."""
    rollouts = [an_episode(2, 3, 1, reward=r) for r in (1.0, 0.0, 0.0, 1.0)]
    found = credited(rollouts, credit="episode", advantage_eps=1e-6)
    assert [r.advantage for r in found] == pytest.approx([0.8660, -0.8660, -0.8660, 0.8660], abs=5e-5)
    assert {r.turn_advantages for r in found} == {None}
    mask = rollout_tensors(found, pad_id=0)["response_mask"]
    assert mask.sum(dim=1).tolist() == [3] * 4
    by_turn = credited(rollouts, advantage_eps=1e-6)
    assert [r.turn_advantages for r in by_turn] == [(r.advantage, r.advantage) for r in found], "all have as many turns"


# --- in a batch


def test_each_token_has_the_advantage_of_its_turn_and_the_environments_none():
    first, second = credited(pair(prompt_ids=(8, 9)), use_std_normalization=False)
    assert (first.turn_advantages, second.turn_advantages) == ((0, 0.5), (0, -0.5))
    assert (first.advantage, second.advantage) == pytest.approx((0.5 * 2 / 6, -0.5 * 2 / 6))
    batch = rollout_tensors([first, second], pad_id=0)
    assert batch["advantages"].tolist() == [[0, *[0] * 4, *[0] * 3, 0.5, 0.5], [0, *[0] * 4, *[0] * 3, -0.5, -0.5]]
    assert batch["response_mask"].tolist() == [[False, *[True] * 4, *[False] * 3, True, True]] * 2
    assert zero_advantage_rows(batch).tolist() == [[False], [False]]
    early = replace(first, turn_advantages=(2.0, 0.0))
    assert rollout_tensors([early], pad_id=0)["advantages"].tolist() == [[0, *[2] * 4, *[0] * 5]]
    assert rollout_tensors([replace(first, turn_advantages=(0.0, 0.0))], pad_id=0)["advantages"].shape == (1, 10)
    one = a_rollout(response_ids=(2, 3), sampled_logprobs=(-1.0, -1.0), turn_advantages=(0.25,))
    assert rollout_tensors([one], pad_id=0)["advantages"].tolist() == [[0.25, 0.25]]


def test_a_run_that_goes_on_trains_on_the_same_bytes(tmp_path):
    rollouts = credited(
        [an_episode(4, 3, 2, turn_rewards=r, run_id="r", phase="train") for r in ((0.1, 0.7), (1.0, None))]
    )
    rollouts = [replace(r, sample_index=i) for i, r in enumerate(rollouts)]
    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        run.commit_rollouts("train", 0, rollouts)
    stored = to_rollouts(read_rollouts(tmp_path / "r"))
    assert [r.turn_advantages for r in stored] == [r.turn_advantages for r in rollouts]
    returns = [[turn_returns(r) for r in rows] for rows in (rollouts, stored)]
    assert returns[0] == returns[1], "of the rewards as they are stored"
    tensors = [rollout_tensors(rows, pad_id=0)["advantages"].numpy().tobytes() for rows in (rollouts, stored)]
    assert tensors[0] == tensors[1]


# --- with other options


def test_what_shapes_the_reward_comes_with_the_last_turn():
    """Terms are of the whole response: they are among the rewards from each of its turns on."""
    how = {"overlong": "soft_punish", "sampling_max_tokens": 8, "overlong_buffer": 4, "use_std_normalization": False}
    long, short = an_episode(4, 9, 2, turn_rewards=(1.0, 0.0)), an_episode(2, 9, 2, turn_rewards=(1.0, 0.0))
    first, second = credited([long, short], **how)
    assert (first.shaped_reward, second.shaped_reward) == (0.5, 1.0)  # 6 tokens of the policy are 2 too many of 4
    assert (first.turn_advantages, second.turn_advantages) == ((-0.25, -0.25), (0.25, 0.25))


def test_equal_terms_make_no_advantage_whatever_the_reward_before_them():
    """1 + 0.1 - 1 is not 0.1; without an eps the difference would be divided by itself."""
    episodes = [an_episode(2, 1, 2, turn_rewards=(first, 0.0), format_reward=0.1) for first in (1.0, 0.0)]
    first, second = credited(episodes, format_weight=1.0)
    assert (first.turn_advantages[1], second.turn_advantages[1]) == (0.0, 0.0)
    assert first.turn_advantages[0] > 0.7


def test_a_group_of_equal_sums_has_a_signal_if_its_turns_differ():
    groups = [*pair(), *(an_episode(1, 1, 1, reward=1.0) for _ in range(2)), an_episode(1), an_episode(1, 1, 1)]
    assert groups_with_signal(groups, group_size=2, by_turn=True) == [True, False, False]
    assert groups_with_signal(groups, group_size=2, by_turn=False) == [False, False, False]
    shares = [
        group_metrics(groups, step=0, group_size=2, shaped=False, by_turn=by_turn)["groups/signal_share"]
        for by_turn in (True, False)
    ]
    assert shares == [pytest.approx(1 / 3), 0.0]


@pytest.mark.parametrize("rewards", [(0.0, 1.0), (-1.0, 1.0), (0.25, 0.75)])
def test_a_group_is_all_right_or_all_wrong_whatever_the_rewards_of_right_and_wrong_are(rewards):
    """One group is right, two are wrong, one of these with a failed grade; the mean of the mixed one tells nothing."""
    wrong, right = rewards
    groups = [right, right, wrong, wrong, wrong, None, wrong, right]
    found = group_metrics([a_rollout(reward=r) for r in groups], step=0, group_size=2, shaped=False, by_turn=False)
    assert (found["groups/all_correct_share"], found["groups/all_wrong_share"]) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"credit": "turn"}, "--credit turn has no effect without --environment or --tool"),
        ({**PLAYED, "std_normalization": "batch"}, "--credit turn and --std-normalization batch exclude each other"),
    ],
)
def test_options_with_which_it_means_nothing_are_refused(given, problem):
    with pytest.raises(RlvrError) as error:
        GrpoConfig(**given)
    assert error.value.problem.startswith(problem)


def test_a_loss_without_a_baseline_is_refused_and_all_others_are_not():
    with pytest.raises(RlvrError, match="no_baseline compares nothing"):
        policy_gradient_loss(GrpoConfig(**PLAYED, loss_type="no_baseline"))
    for name in LOSSES:
        if name != "no_baseline":
            policy_gradient_loss(GrpoConfig(**PLAYED, loss_type=name))
    policy_gradient_loss(GrpoConfig(environment="calculator", loss_type="no_baseline"))


def test_a_loss_of_ones_own_is_tried_with_an_advantage_of_each_token(tmp_path):
    of_tokens = "    assert inputs.advantages.shape == inputs.log_probs.shape\n    return -inputs.advantages * inputs.log_probs\n"
    (tmp_path / "mine.py").write_text(f"def loss(inputs):\n{of_tokens}")
    policy_gradient_loss(GrpoConfig(**PLAYED, loss_type=f"{tmp_path}/mine.py:loss"))
    with pytest.raises(RlvrError, match="AssertionError"):
        policy_gradient_loss(GrpoConfig(loss_type=f"{tmp_path}/mine.py:loss"))


def test_the_plan_has_the_formula():
    assert advantage_formula(GrpoConfig(**PLAYED), LOSSES["grpo_clip"]) == (
        "A_i = (G_i,k - mean(G_k)) / (std(G_k) + 1e-06) at the tokens of turn k, G_i,k the sum of the rewards r_i from turn k on, over the "
        "episodes of the group with a turn k; 0 where all G_k are equal"
    )
    shaped = GrpoConfig(**PLAYED, use_std_normalization=False, format_weight=0.5)
    assert "A_i = G_i,k - mean(G_k) at" in advantage_formula(shaped, LOSSES["grpo_clip"])
    assert "R_i - r_i added to that of the last turn" in advantage_formula(shaped, LOSSES["grpo_clip"])


# --- identities

rewards = st.sampled_from([-0.5, 0.0, 0.125, 0.75, 1.0])
groups = st.lists(st.lists(rewards, min_size=1, max_size=4), min_size=2, max_size=5)


@given(groups, st.booleans())
@settings(max_examples=40)
def test_it_is_the_definition_as_the_replay_has_it(group, by_std):
    options = {"loss_type": "grpo_clip", "std_normalization": "group" if by_std else "none", "advantage_eps": 1e-6}
    episodes = [an_episode(*[1] * (2 * len(r) - 1), turn_rewards=tuple(r)) for r in group]
    returns = [turn_returns(e) for e in episodes]
    assert returns == [[pytest.approx(sum(r[k:])) for k in range(len(r))] for r in group]
    found = turn_advantages(returns, group_size=len(group), advantage_eps=1e-6, normalize_by_std=by_std)
    expected = formulas.turn_advantages([formulas.turn_returns(r) for r in group], options)
    assert [a for of in found for a in of] == pytest.approx([a for of in expected for a in of], abs=1e-8)
    for turn in range(max(map(len, group))):
        assert sum(of[turn] for of in found if len(of) > turn) == pytest.approx(0, abs=1e-8), "centered"


@given(st.lists(rewards, min_size=2, max_size=6), st.booleans())
@settings(max_examples=20)
def test_with_one_turn_each_it_is_the_advantage_of_the_episode(of_group, by_std):
    how = {"group_size": len(of_group), "advantage_eps": 1e-6, "normalize_by_std": by_std}
    expected = group_advantages(torch.tensor(of_group, dtype=torch.float64), **how).tolist()
    assert turn_advantages([[r] for r in of_group], **how) == [[a] for a in expected]
