"""A user's own loss, FILE.py:FUNCTION: what is accepted, and what is refused before anything is trained."""

import re

import pytest
import torch

from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.training.losses.chosen import policy_gradient_loss
from rlvr_cli.training.losses.custom import RESERVED, load_loss
from rlvr_cli.training.losses.inputs import LossInputs
from rlvr_cli.training.losses.policy_gradient import LOSSES


@pytest.fixture
def load(tmp_path):
    """Write a file and load its function `loss`; its first line is line 2."""

    def of(source, *, with_reference=False, with_stale=False):
        file = tmp_path / "mine.py"
        file.write_text(f"import torch\n{source}\n")
        return load_loss(f"{file}:loss", with_reference=with_reference, with_stale=with_stale)

    return of


def make_inputs(seed=3):
    generator = torch.Generator().manual_seed(seed)

    def values():
        return -torch.rand(4, 6, generator=generator)

    mask = torch.rand(4, 6, generator=generator) < 0.7
    log_probs = values().requires_grad_()
    return LossInputs(log_probs, -values(), mask, values(), torch.randn(4, 1, generator=generator), values())


def test_a_copy_of_grpo_clip_is_grpo_clip(load):
    loss = load(
        "def loss(inputs):\n"
        "    ratio = (inputs.log_probs - inputs.old_log_probs).exp()\n"
        "    limited = ratio.clamp(1 - 0.2, 1 + 0.2) * inputs.advantages\n"
        "    return -torch.minimum(ratio * inputs.advantages, limited), {'clipped': limited < ratio * inputs.advantages}"
    )
    inputs = make_inputs()
    ours, theirs = (
        loss.function(inputs),
        LOSSES["grpo_clip"].function(inputs, cliprange=0.2, cliprange_high=None),
    )
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(ours.statistics["clipped"], theirs.statistics["clipped"])
    assert (loss.per_row, loss.skip_zero_advantage, loss.options) == (False, False, ())
    assert loss.formula().endswith("mine.py:loss")


def test_a_loss_may_be_per_row(load):
    loss = load("def loss(inputs):\n    return -(inputs.log_probs * inputs.response_mask).sum(dim=1)")
    assert loss.per_row
    inputs = make_inputs()
    torch.testing.assert_close(
        loss.function(inputs).loss, -inputs.log_probs.where(inputs.response_mask, torch.tensor(0.0)).sum(1)
    )


def test_what_lies_outside_the_responses_may_be_anything(load):
    load("def loss(inputs):\n    return -torch.where(inputs.response_mask, inputs.log_probs, torch.nan)")


def test_reference_log_probs_are_there_when_the_run_has_them(load):
    source = "def loss(inputs):\n    return inputs.reference_log_probs - inputs.log_probs"
    load(source, with_reference=True)
    with pytest.raises(RlvrError, match=r"mine.py:3: the loss raised TypeError: .*NoneType") as raised:
        load(source)
    assert "--kl-coef" in raised.value.hint


def test_stale_tokens_are_told_when_responses_are_sampled_in_parts(load, tmp_path):
    source = (
        "def loss(inputs):\n"
        "    assert inputs.stale.any() and (inputs.response_mask | ~inputs.stale).all()\n"
        "    return -torch.where(inputs.stale, 0.5, 1.0) * inputs.log_probs"
    )
    load(source, with_stale=True)
    policy_gradient_loss(GrpoConfig(loss_type=f"{tmp_path}/mine.py:loss", partial_rollout_tokens=256))
    with pytest.raises(RlvrError, match=r"mine.py:3: the loss raised AttributeError: .*NoneType") as raised:
        load(source)
    assert "stale without --partial-rollout-tokens" in raised.value.hint


LOG_PROBS = "inputs.log_probs"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return inputs.log_probs.mean()", r"mine.py:2: the loss has shape \(\), where \(batch, seq\) is \(3, 5\)"),
        ("return inputs.log_probs.sum(0)", r"the loss has shape \(5,\)"),
        ("return inputs.log_probs.T", r"the loss has shape \(5, 3\)"),
        ("return inputs.log_probs.sum(1, keepdim=True)", r"the loss has shape \(3, 1\)"),
        ("return None", "mine.py:2: the loss returned a value of type NoneType"),
        ("return 1.5", "a value of type float"),
        ("return inputs.log_probs, []", r"a value of type \(Tensor, list\)"),
        ("return inputs.log_probs, {}, {}", r"a value of type \(Tensor, dict, dict\)"),
        ("return inputs.log_probs, {'x': 1.0}", "x is a float, not a tensor"),
        ("return inputs.log_probs, {'x': inputs.log_probs.mean()}", r"x has shape \(\)"),
        ("return inputs.log_probs, {3: inputs.log_probs}", "3 is not a valid name of a statistic"),
        ("return inputs.log_probs, {'a/b': inputs.log_probs}", "'a/b' is not a valid name of a statistic"),
        *(
            (f"return inputs.log_probs, {{'{name}': inputs.log_probs}}", f"rlvr itself has a statistic {name}")
            for name in RESERVED
        ),
        ("return inputs.log_probs.detach()", "mine.py:2: the loss has no gradient"),
        ("return -inputs.entropy", "the loss has no gradient"),
        ("return inputs.log_probs * torch.inf", "the loss is not finite before the first update on a batch"),
        (
            "return (inputs.log_probs - inputs.old_log_probs).log()",
            "the loss is not finite before the first update on a batch",
        ),
        (
            "return ((inputs.log_probs - inputs.old_log_probs) > 0).float().log() * 0 + inputs.log_probs",
            "the loss is not finite",
        ),
        (
            "return (inputs.log_probs - inputs.old_log_probs).abs().sqrt()",
            "the gradient of the loss is not finite before the first update on a batch",
        ),
        (
            "return inputs.log_probs if torch.equal(inputs.log_probs, inputs.old_log_probs) else inputs.log_probs / 0",
            "the loss is not finite after the first update on a batch",
        ),
        (
            "return inputs.log_probs if torch.equal(inputs.log_probs, inputs.old_log_probs) else inputs.log_probs.sum(1)",
            "sometimes per token and sometimes per row",
        ),
        ("x = 1\n    raise ValueError('boom')", "mine.py:4: the loss raised ValueError: boom"),
        ("return inputs.nothing", "mine.py:3: the loss raised AttributeError: .*nothing"),
        ("inputs.log_probs = 0\n    return 0", "FrozenInstanceError"),
    ],
)
def test_a_loss_that_cannot_be_trained_with_is_refused(load, body, problem):
    with pytest.raises(RlvrError, match=problem) as raised:
        load(f"def loss(inputs):\n    {body}")
    assert raised.value.hint
    assert "\n" not in raised.value.problem


def test_an_error_in_a_helper_names_the_line_in_the_file(load):
    with pytest.raises(RlvrError, match=r"mine.py:2: the loss raised IndexError"):
        load("def helper(x): return [][1]\ndef loss(inputs):\n    return helper(inputs)")


def test_a_file_without_the_function_is_refused(load, tmp_path):
    with pytest.raises(RlvrError, match="defines no function loss"):
        load("def other(inputs): return -inputs.log_probs")
    with pytest.raises(RlvrError, match=re.escape("loss cannot be called with one argument")) as raised:
        load("def loss(inputs, cliprange): return -inputs.log_probs")
    assert raised.value.hint.startswith("A loss has the signature (inputs: LossInputs)")
    with pytest.raises(RlvrError, match="There is no loss file"):
        load_loss(f"{tmp_path / 'none.py'}:loss", with_reference=False)


def test_a_loss_that_fails_in_a_run_says_where(load):
    loss = load(
        "def loss(inputs):\n"
        "    if len(inputs.log_probs) == 4:\n"
        "        raise RuntimeError('four')\n"
        "    return -inputs.log_probs"
    )
    with pytest.raises(RlvrError, match=r"mine.py:4: the loss raised RuntimeError: four"):
        loss.function(make_inputs())
