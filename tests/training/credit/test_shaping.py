"""Terms of the shaped reward, worked by hand."""

from importlib.util import find_spec

import pytest

from factories import a_rollout
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.training.credit.shaping import length_rewards, reward_terms, rewards_of
from rlvr_cli.training.planning.plan import shaped_reward_formula
from rlvr_cli.types import Turn, TurnFacts

RIGHT, WRONG = True, False
SENTENCE = "Wir addieren die beiden Zahlen und erhalten das Ergebnis."


@pytest.mark.parametrize(
    ("lengths", "correct", "expected"),
    [
        ([10, 20, 40, 50], [RIGHT, RIGHT, WRONG, WRONG], [0.5, 0.25, -0.25, -0.5]),
        ([10, 20, 40, 50], [WRONG, WRONG, RIGHT, RIGHT], [0, 0, -0.25, -0.5]),
        ([10, 20, 40, 50], [RIGHT] * 4, [0.5, 0.25, -0.25, -0.5]),
        ([10, 20, 40, 50], [WRONG] * 4, [0, 0, 0, 0]),
        ([7, 7, 7, 7], [RIGHT, WRONG, RIGHT, WRONG], [0, 0, 0, 0]),
        ([1, 2], [RIGHT, RIGHT], [0.5, -0.5]),
    ],
)
def test_length_rewards_worked_by_hand(lengths, correct, expected):
    assert length_rewards(lengths, correct, group_size=len(lengths)).tolist() == pytest.approx(expected, abs=1e-15)


def test_lengths_are_compared_within_their_group():
    two = length_rewards([10, 20, 100, 300], [RIGHT, WRONG, RIGHT, RIGHT], group_size=2)
    assert two.tolist() == [0.5, -0.5, 0.5, -0.5]


def rollouts():
    rows = [(1.0, 1.0, 10, "we add"), (0.0, 1.0, 20, "数字"), (None, None, 5, "we 数"), (1.0, 0.5, 30, "")]
    return [
        a_rollout(reward=reward, format_reward=shape, num_response_tokens=length, response=text)
        for reward, shape, length, text in rows
    ]


def terms(number=0, **given):
    found = reward_terms(rollouts(), GrpoConfig(group_size=2, sampling_max_tokens=30, **given), number=number)
    return {name: values.tolist() for name, values in found.items()}


def test_each_term_is_there_when_it_is_asked_for():
    assert terms() == {}
    assert terms(format_weight=0.5) == {"format_term": [0.5, 0.5, 0.0, 0.25]}
    assert terms(length_reward=2.0) == {"length_term": [1.0, -1.0, 0.0, -1.0]}
    assert terms(language_reward=3.0) == {"language_term": [3.0, 0.0, 1.5, 3.0]}
    assert terms(language_reward=3.0, language="zh") == {"language_term": [0.0, 3.0, 1.5, 3.0]}
    assert terms(overlong="soft_punish", overlong_buffer=20) == {"overlong_term": [0.0, -0.5, 0.0, -1.0]}
    every = terms(format_weight=0.5, length_reward=2.0, language_reward=3.0, overlong="soft_punish")
    assert list(every) == ["format_term", "length_term", "language_term", "overlong_term"]


def test_the_language_is_that_of_the_policys_turns():
    texts = [("policy", "wir add "), ("tool", "数字数字数字"), ("policy", "数")]
    turns, ends = [], [8, 14, 15]
    for number, (role, _) in enumerate(texts):
        turns.append(Turn(role, number, number + 1))
    row = a_rollout(
        response="".join(t for _, t in texts), turns=tuple(turns), turn_facts=TurnFacts(tuple(ends), (), ())
    )
    (share,) = reward_terms([row], GrpoConfig(group_size=1, language_reward=1.0), number=0)["language_term"].tolist()
    (alone,) = reward_terms(
        [a_rollout(response="wir add 数")], GrpoConfig(group_size=1, language_reward=1.0), number=0
    )["language_term"].tolist()
    assert share == alone < 1


def test_the_penalty_of_length_is_the_formula_of_the_plan():
    config = GrpoConfig(overlong="soft_punish", overlong_buffer=20, group_size=2, sampling_max_tokens=30)
    formula = shaped_reward_formula(config).removeprefix("R_i = r_i")
    by_hand = [eval(formula.replace("|o_i|", str(r.num_response_tokens))) for r in rollouts()]
    assert reward_terms(rollouts(), config, number=0)["overlong_term"].tolist() == by_hand


def test_the_length_reward_counts_after_its_batches():
    for number, counts in ((0, False), (1, False), (2, True), (9, True)):
        assert any(terms(number, length_reward=1.0, length_reward_after=2)["length_term"]) == counts


def test_a_grade_that_failed_is_no_reward():
    assert rewards_of(rollouts()).tolist() == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.skipif(find_spec("py3langid") is None, reason="py3langid is not installed")
def test_the_detector_is_the_one_that_is_asked_for():
    """Two Latin languages have one script."""
    rows = [a_rollout(response=SENTENCE)] * 2
    for detector, share in (("script", 1.0), ("py3langid", 0.0)):
        config = GrpoConfig(group_size=2, language_reward=2.0, language="en", language_detector=detector)
        assert reward_terms(rows, config, number=0)["language_term"].tolist() == [2 * share] * 2
