"""`printable` escapes all characters that a terminal acts on; `storable` escapes all that UTF-8 cannot encode."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_cli.text import printable, storable

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
