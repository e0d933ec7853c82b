"""Prompts that leave no room for their response are named before anything is sampled; only those that may are tokenized."""

import tracemalloc
from dataclasses import replace
from itertools import cycle, islice

import pytest

from rlvr_cli.data.prompts import PromptTemplate, prompt_of
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.models.pretrained import load_tokenizer
from rlvr_cli.models.tokens.tokenization import encode_prompts
from rlvr_cli.rollouts.prompt_lengths import bound_of, check_prompts
from rlvr_cli.types import Example

TEMPLATE = PromptTemplate("plain", "{question}")
TEXTS = (
    "",
    "17 + 25?",
    "größer als 3.900",
    "\u0958\U0001d160\U0001d163",
    "😀👩‍🚀",
    "\ud83d",
    "日本語のテキスト",
    "\x00\x7f",
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(builtin_model_path())


def asked(*questions):
    return [Example(f"e-{number}", question, "1") for number, question in enumerate(questions, 1)]


def check(examples, tokenizer, *, template=TEMPLATE, max_tokens=8, context=64, note=""):
    check_prompts(
        examples, template, tokenizer, max_tokens=max_tokens, context=context, note=note, options=["--a", "--b"]
    )


def test_a_prompt_fits_up_to_its_last_token(tokenizer):
    (ids,) = encode_prompts(tokenizer, ["1 + " * 60])
    examples = asked("1 + 1?", "1 + " * 60)
    check(examples, lambda: tokenizer, max_tokens=8, context=len(ids) + 8)
    with pytest.raises(RlvrError) as raised:
        check(examples, lambda: tokenizer, max_tokens=9, context=len(ids) + 8, note=" (so)")
    assert raised.value.problem == (
        f"Question e-2 has a prompt of {len(ids)} tokens; with 9 for the response that is {len(ids) + 9}, and the context "
        f"holds {len(ids) + 8} (so)."
    )
    assert "shorter responses: --a or --b." in raised.value.hint


def test_a_late_prompt_is_found_among_many_long_ones(tokenizer):
    (ids,) = encode_prompts(tokenizer, ["1 + " * 60])
    examples = asked(*["1 + " * 60] * 600, "1 + " * 61)
    with pytest.raises(RlvrError, match="Question e-601 has"):
        check(examples, lambda: tokenizer, max_tokens=8, context=len(ids) + 8)


@pytest.mark.parametrize("text", TEXTS)
def test_the_bound_is_one_for_any_text(tokenizer, text):
    for template in ("{question}", "17 + 25? " * 20 + "{question}{question}", "{subject}: {question}"):
        template, question = PromptTemplate("t", template), text * 50
        for example in asked(question), [replace(*asked("1?"), prompt=question)]:
            prompt = prompt_of(*example, template).encode(errors="replace").decode()
            (ids,) = encode_prompts(tokenizer, [prompt])
            assert len(ids) <= bound_of(template)(*example)
            check(example, lambda: tokenizer, template=template, context=len(ids) + 8)  # tokenized, and it fits


def test_short_prompts_need_no_tokenizer_and_no_memory():
    examples = islice(cycle(asked("17 + 25?", "größer?")), 100_000)
    tracemalloc.start()
    try:
        check(examples, lambda: pytest.fail("it was loaded"))
        assert tracemalloc.get_traced_memory()[1] < 2**18
    finally:
        tracemalloc.stop()
