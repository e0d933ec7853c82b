"""Options as words and back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_cli.config import config_of
from rlvr_cli.config.parsing.command_line import values_of, words_of
from rlvr_cli.config.parsing.options import options, value_type
from rlvr_cli.config.parsing.sources import CONFIGURED
from rlvr_cli.errors import RlvrError


def values_for(option):
    """Values that an option may have."""
    kind, repeatable, choices, _ = value_type(option)
    one = {
        bool: st.booleans(),
        int: st.integers(-(2**40), 2**40),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.sampled_from(choices)
        if choices
        else st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=8),
    }[kind]
    return st.lists(one, min_size=1, max_size=3).map(tuple) if repeatable else one


@pytest.mark.parametrize("command", CONFIGURED)
@settings(max_examples=30)  # of each command
@given(data=st.data())
def test_words_give_back_the_values(command, data):
    kind = config_of(command)
    known = [option for option in options(kind) if not option.metadata["argument"]]
    chosen = data.draw(st.lists(st.sampled_from(known), unique_by=lambda option: option.name, max_size=6))
    values = {option.name: data.draw(values_for(option)) for option in chosen}
    words = words_of(kind, values)
    assert all(isinstance(word, str) for word in words)
    found = values_of(kind, words, command=command)
    assert found == values
    assert all(type(found[name]) is type(value) for name, value in values.items())


def test_words_as_one_types_them():
    kind = config_of("grpo")
    words = "--learning-rate=1e-5 --no-use-std-normalization --stop a --stop b --seed 1 --seed 2".split()
    assert values_of(kind, words, command="grpo") == {
        "learning_rate": 1e-5,
        "use_std_normalization": False,
        "stop": ("a", "b"),
        "seed": 2,
    }
    assert words_of(kind, {"dynamic_sampling": True, "stop": (), "cliprange": None}) == [
        "--dynamic-sampling",
        "--stop",
        "",
    ]


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        (["--lr", "1"], "'--lr' is not an option of rlvr grpo", "Did you mean --learning-rate?"),
        (["--xyzzyx", "1"], "'--xyzzyx' is not an option", "rlvr grpo --help-all"),
        (["3"], "'3' is not an option of rlvr grpo", "--help-all"),
        (["--no-seed"], "'--no-seed' is not an option", ""),
        (["--seed"], "--seed has no value", "--help-all"),
        (["--seed", "x"], "--seed is 'x'", "whole number"),
        (["--dynamic-sampling=true"], "--dynamic-sampling takes no value", "--no-dynamic-sampling"),
        (["--loss-type", "gspoo"], "--loss-type is 'gspoo'. Did you mean gspo", "Choose one of"),
    ],
)
def test_words_that_are_refused(words, problem, hint):
    with pytest.raises(RlvrError) as raised:
        values_of(config_of("grpo"), words, command="grpo")
    assert problem in raised.value.problem
    assert hint in raised.value.hint
