import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_cli.data.prompts import PromptTemplate, load_prompt, prompt_names
from rlvr_cli.errors import RlvrError

HANDOUT = {  # SHA-256 of the handout's own files
    "question_only": "bf085a6e12c9d0e23a9dd157df084f933b2ef021caba82def1494bfb84a723c9",
    "r1_zero": "56213732da87e12ace60a2b88a16df0af18280fb0563a957cbecc938a6a2ac0e",
}
no_placeholder = st.text().filter(lambda text: "{question}" not in text)


@pytest.mark.parametrize("name", HANDOUT)
def test_the_built_in_prompts_are_the_handouts_to_the_byte(name):
    assert hashlib.sha256(load_prompt(name).text.encode()).hexdigest() == HANDOUT[name]


def test_the_built_in_prompts_filled():
    assert prompt_names() == sorted([*HANDOUT, "alpaca"])
    assert load_prompt("question_only").fill("What is 1+1?") == "What is 1+1?"
    filled = load_prompt("r1_zero").fill("What is 1+1?")
    assert filled.endswith("answer here </answer>.\nUser: What is 1+1?\nAssistant: <think>")
    assert filled.count("What is 1+1?") == 1
    assert load_prompt("alpaca").fill("Add.").endswith("request.\n\n### Instruction:\nAdd.\n\n### Response:\n")


@given(question=st.text() | st.sampled_from(["{question}", "{answer}", "{0}", "{}", "%s", "\\1", "{x.__class__}"]))
def test_a_question_is_inserted_once_and_the_rest_of_the_template_stays(question):
    before, after = load_prompt("r1_zero").text.split("{question}")
    assert load_prompt("r1_zero").fill(question) == before + question + after


@given(before=no_placeholder, after=no_placeholder, question=st.text())
def test_everything_but_the_placeholder_is_literal(before, after, question):
    text = f"{before}{{question}}{after}"
    if text.count("{question}") == 1:  # the joined texts form no second placeholder
        assert PromptTemplate("mine", text).fill(question) == before + question + after


def test_braces_are_literal_and_the_inserted_question_is_not_filled_again():
    template = PromptTemplate("mine", 'Say {"answer": {0}} for {question}; again: {question} {answer} {{question}}')
    assert template.fill("{question}{answer}") == (
        'Say {"answer": {0}} for {question}{answer}; again: {question}{answer} {answer} {{question}{answer}}'
    )


def test_a_file_is_kept_to_the_byte(tmp_path):
    path = tmp_path / "mine.prompt"
    path.write_bytes("\r\n Frage: {question}\u2028½\r\n\n".encode())
    template = load_prompt(str(path))
    assert template == PromptTemplate(str(path), "\r\n Frage: {question}\u2028½\r\n\n")
    path.write_bytes(b"\xef\xbb\xbfQ: {question}")
    assert load_prompt(str(path)).text == "Q: {question}"  # a byte order mark is no part of the text


def test_a_built_in_name_beats_a_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r1_zero").write_text("mine {question}")
    assert "mine" not in load_prompt("r1_zero").text
    assert load_prompt("./r1_zero").text == "mine {question}"


def test_an_unknown_prompt_name():
    with pytest.raises(RlvrError, match="no prompt 'r1-zero'") as caught:
        load_prompt("r1-zero")
    assert "Did you mean 'r1_zero'?" in caught.value.hint
    assert "question_only, r1_zero" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"No place for it: {Question} {question }", "does not say where the question goes"),
        (b"", "does not say where the question goes"),
        (b"caf\xe9 {question}", "not UTF-8: byte 0xe9 at offset 3"),
    ],
)
def test_files_that_are_not_templates(tmp_path, content, problem):
    path = tmp_path / "bad.prompt"
    path.write_bytes(content)
    with pytest.raises(RlvrError, match=problem) as caught:
        load_prompt(str(path))
    assert str(path) in caught.value.problem


@pytest.mark.parametrize("name", ["", ".", "a\0b", "x" * 5000])
def test_paths_that_cannot_be_read(name):
    with pytest.raises(RlvrError):
        load_prompt(name)
