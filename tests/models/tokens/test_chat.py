"""Prompts in a model's chat template are those of transformers, to the token; what a template cannot do is said in words."""

from pathlib import Path
from unittest import TestCase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamas import QWEN3_TEMPLATE, write_byte_level_llama, write_chat_llama, write_chat_qwen
from rlvr_cli.data.prompts import PromptTemplate, load_prompt
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.pretrained import load_tokenizer
from rlvr_cli.models.tokens.chat import TODAY, ChatTemplate, chat_prompt
from rlvr_cli.models.tokens.tokenization import encode, encode_prompts
from rlvr_cli.samplers.stop_strings import prompt_token_ids
from rlvr_cli.types import Request

QUESTION = load_prompt("question_only")
BOS = 1


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A model whose tokenizer and whose chat template write BOS."""
    return write_chat_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    """A model without BOS, whose chat template has a switch for thinking."""
    return write_chat_qwen(tmp_path_factory.mktemp("qwen"))


def of_transformers(tokenizer, message: str, *, system: str = "", **switch) -> list[int]:
    """The ids that transformers makes of the conversation."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": message})
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, strftime_now=TODAY.strftime, **switch
    )


@pytest.mark.parametrize("model", ["llama", "qwen"])
@pytest.mark.parametrize("system", ["", "Be brief.\nBe right."])
def test_sampler_and_trainer_get_the_tokens_of_transformers(model, system, request):
    folder = request.getfixturevalue(model)
    tokenizer = load_tokenizer(folder)
    template = PromptTemplate("mine", "Solve: {question}\nPut the answer into \\boxed{}.")
    chat = chat_prompt(template, ChatTemplate(folder, system=system))
    assert chat.name == "mine"
    assert chat_prompt(template, ChatTemplate(folder, system=system)) == chat

    @given(question=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
    @settings(max_examples=50, deadline=None)
    def check(question):
        expected = of_transformers(tokenizer, template.fill(question), system=system)
        prompt = chat.fill(question)
        assert prompt_token_ids(tokenizer, [Request(prompt, ())], vocab_size=320) == [expected]
        assert encode([prompt], ["x"], tokenizer)[0] == [expected]
        assert expected.count(BOS) == ((model == "llama") + question.count("<s>"))
        assert tokenizer.decode(expected) == prompt

    check()


def test_a_prompt_begins_with_bos_once(llama, qwen):
    tokenizer = load_tokenizer(llama)
    plain = tokenizer("1 + 1", add_special_tokens=False).input_ids
    assert encode_prompts(tokenizer, ["1 + 1", "<s>1 + 1", "<s><s>1", "", "<s>"]) == [
        [BOS, *plain], [BOS, *plain], [BOS, BOS, plain[0]], [BOS], [BOS]
    ]  # fmt: skip
    assert encode_prompts(tokenizer, []) == []
    without = load_tokenizer(qwen)
    assert encode_prompts(without, ["1", "<s>1"]) == [without("1").input_ids, [BOS, *without("1").input_ids]]


def test_a_front_of_two_tokens_is_not_written_twice(qwen):
    from tokenizers import processors

    tokenizer = load_tokenizer(qwen)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> <s> $A", special_tokens=[("<pad>", 2), ("<s>", BOS)]
    )
    one = tokenizer("1", add_special_tokens=False).input_ids
    assert encode_prompts(tokenizer, ["1", "<pad><s>1", "<s>1"]) == [
        [2, BOS, *one], [2, BOS, *one], [2, BOS, BOS, *one]
    ]  # fmt: skip


def test_thinking_is_switched(qwen):
    texts = {
        thinking: chat_prompt(QUESTION, ChatTemplate(qwen, thinking=thinking)).text
        for thinking in ("auto", "on", "off")
    }
    assert texts["auto"] == texts["on"] == "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert texts["off"] == texts["on"] + "<think>\n\n</think>\n\n"
    tokenizer = load_tokenizer(qwen)
    ids = encode_prompts(tokenizer, [texts["off"].replace("{question}", "1?")])
    assert ids == [of_transformers(tokenizer, "1?", enable_thinking=False)]


def test_the_other_name_of_the_switch_is_known(tmp_path):
    template = "{{ messages[0].content }}{% if thinking %}<think>{% endif %}"
    model = write_byte_level_llama(tmp_path / "m", chat_template=template)
    assert chat_prompt(QUESTION, ChatTemplate(model, thinking="on")).text == "{question}<think>"
    assert chat_prompt(QUESTION, ChatTemplate(model, thinking="off")).text == "{question}"


@pytest.mark.parametrize("thinking", ["on", "off"])
def test_a_template_without_a_switch_for_thinking(llama, thinking):
    with pytest.raises(RlvrError, match="no switch for thinking") as caught:
        chat_prompt(QUESTION, ChatTemplate(llama, thinking=thinking))
    assert "--chat-thinking" in caught.value.hint


def test_the_system_message_comes_first(llama):
    text = chat_prompt(QUESTION, ChatTemplate(llama, system="Be brief.")).text
    assert text == "<s><|system|>\n26 Jul 2024\nBe brief.<|end|>\n<|user|>\n{question}<|end|>\n<|assistant|>\n"


def test_the_date_is_the_same_every_day(llama, monkeypatch):
    text = chat_prompt(QUESTION, ChatTemplate(llama)).text
    monkeypatch.setattr("rlvr_cli.models.tokens.chat.TODAY", TODAY.replace(day=27))
    assert chat_prompt(QUESTION, ChatTemplate(llama)).text == text.replace("26 Jul 2024", "27 Jul 2024") != text


def test_a_model_without_a_chat_template(tmp_path):
    model = write_byte_level_llama(tmp_path / "base", chat_template=None)
    with pytest.raises(RlvrError, match="base has no chat template") as caught:
        chat_prompt(QUESTION, ChatTemplate(model))
    assert "--chat" in caught.value.hint


@pytest.mark.parametrize(
    ("chat_template", "problem"),
    [
        ("{% if %}", "fails .TemplateSyntaxError: "),
        ("{{ raise_exception('only\x1b in French') }}", r"fails .TemplateError: only\\x1b in French.\."),
        ("{{ messages[0].content / 2 }}", "fails .TypeError: "),
        ("{{ missing.name }}", "fails .UndefinedError: "),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "fails .SecurityError: "),
        ("{{ messages.append(1) }}", "fails .SecurityError: "),
        ("<s>", "changes or leaves out the message '{question}'"),
        ("{{ messages[0].content | upper }}", "changes or leaves out the message '{question}'"),
        ("{{ messages[0].content }}{{ messages[0].content | length }}", "changes or leaves out the message 'What is"),
        ("{{ messages[0].content | replace('\"', '') }}", "changes or leaves out the message 'What is"),
    ],
)
def test_a_template_that_fails_or_changes_messages_is_refused_in_words(tmp_path, chat_template, problem):
    model = write_byte_level_llama(tmp_path / "m", chat_template=chat_template)
    with pytest.raises(RlvrError, match=problem):
        chat_prompt(QUESTION, ChatTemplate(model))


@pytest.mark.parametrize(
    ("chat_template", "problem", "hint"),
    [
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
            "{{ messages[0].content }}",
            "System role not supported",
            "leave --chat-system out",
        ),
        ("{{ messages[-1].content }}", "leaves out the message 'Be brief.'", ""),
    ],
)
def test_a_template_that_knows_no_system_message(tmp_path, chat_template, problem, hint):
    model = write_byte_level_llama(tmp_path / "m", chat_template=chat_template)
    assert chat_prompt(QUESTION, ChatTemplate(model)).text == "{question}"
    with pytest.raises(RlvrError, match=problem) as caught:
        chat_prompt(QUESTION, ChatTemplate(model, system="Be brief."))
    assert hint in caught.value.hint


def test_bos_that_only_the_tokenizer_writes_is_noted(tmp_path, llama, qwen):
    model = write_byte_level_llama(tmp_path / "m", chat_template=QWEN3_TEMPLATE, adds_bos=True)
    with TestCase().assertLogs() as logged:
        prompt = chat_prompt(QUESTION, ChatTemplate(model)).fill("1?")
    assert "adds special tokens that its chat template does not write" in logged.output[0]
    tokenizer = load_tokenizer(model)
    assert encode_prompts(tokenizer, [prompt]) == [[BOS, *of_transformers(tokenizer, "1?")]]
    with TestCase().assertNoLogs():
        chat_prompt(QUESTION, ChatTemplate(llama))
        chat_prompt(QUESTION, ChatTemplate(qwen))
