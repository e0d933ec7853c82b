"""Prompts that fit a context: as much of programs as it holds, said once; and an estimate of tokens that is rather too high."""

from rlvr_cli.discovery.fitting import SHOWN_CHARACTERS, Fitting, estimated_tokens
from rlvr_cli.discovery.strategies import shortened
from rlvr_cli.models.identity import model_path
from rlvr_cli.models.pretrained import load_tokenizer

PROGRAM = "x = 1234\n" * 1000


def test_a_prompt_shows_as_much_as_fits_and_says_once_that_it_is_less():
    said = []
    fitting = Fitting(lambda text: len(text) <= 5000, said.append)
    for program in (PROGRAM, PROGRAM, "x = 1"):
        prompt = fitting.prompt(lambda shown, program=program: shortened(program, shown))
        assert 4950 < len(prompt) <= 5000 or prompt == program == "x = 1"
    assert len(said) == 1
    assert "characters of a program" in said[0]
    assert "may not hold more" in said[0], "tokens may be estimated"


def test_what_fits_is_not_changed_and_what_never_fits_shows_nothing():
    said = []
    assert Fitting(lambda text: True, said.append).prompt(str) == str(SHOWN_CHARACTERS)
    assert said == []
    assert Fitting(lambda text: False, said.append).prompt(str) == "0"
    assert said == [
        "note: prompts show nothing of programs: with --sampling-max-tokens the model's context may not hold more"
    ]


def test_tokens_are_estimated_and_rather_too_many():
    assert estimated_tokens("") == 0
    assert estimated_tokens("for i in range(11):") == 10
    assert estimated_tokens("[1, -1, 0]") == 10
    assert estimated_tokens("größer") == 6
    text = "Write a program. Some of the words are longer than others, and numbers are 12 and 345.\n"
    assert estimated_tokens(text) >= len(text.split())
    assert estimated_tokens("x = 1234") >= len(load_tokenizer(model_path("")).encode("x = 1234"))
