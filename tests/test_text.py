"""`printable` escapes all characters that a terminal acts on, `storable` all that UTF-8 cannot encode; `filled_in` undoes a template."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_cli.text import filled_in, printable, storable

ANY_TEXT = st.text(st.characters(exclude_categories=()))  # surrogates included


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ½ π 数", "plain ½ π 数"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\x00b\x7f\x9b", r"a\x00b\x7f\x9b"),
        ("\u202eabc", r"\u202eabc"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
        ("line\nand\ttab\r", "line\nand\ttab\\x0d"),
        ("\u2028", r"\u2028"),
    ],
)
def test_printable_escapes_active_characters(text, shown):
    assert printable(text) == shown


@given(ANY_TEXT)
def test_printable_leaves_only_newline_and_tab(text):
    assert all(c in "\n\t" or (ord(c) >= 0x20 and not 0x7F <= ord(c) <= 0x9F) for c in printable(text))
    printable(text).encode()


@given(ANY_TEXT)
def test_storable_is_utf8_and_keeps_good_text(text):
    storable(text).encode()
    if not any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        assert storable(text) == text


@pytest.mark.slow
@settings(max_examples=40)
@given(
    question=st.text(min_size=1, max_size=30),
    parts=st.lists(st.text(max_size=10).filter(lambda t: "{question}" not in t), min_size=2, max_size=4),
)
def test_a_question_is_read_back_from_its_prompt(question, parts):
    template = "{question}".join(parts)
    expected = question if question.strip() else None
    assert filled_in(template.replace("{question}", question), template, placeholder="{question}") == expected


def test_a_prompt_of_another_template_has_no_question():
    assert filled_in("Q: 1? A:", "Q: {question} B:", placeholder="{question}") is None
    assert filled_in("Q: 1? 2? A:", "Q: {question} {question} A:", placeholder="{question}") is None
    assert filled_in("anything", "no place for it", placeholder="{question}") is None
    assert filled_in("", "{question}", placeholder="{question}") is None
