"""The share of a response's words that are in a language, worked by hand, and against what is not a word."""

from importlib.util import find_spec
from typing import get_args

import pytest

from rlvr_cli.config.grpo import Language, LatinLanguage
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders import language
from rlvr_cli.graders.language import SCRIPTS, check_detector, language_share

needs_py3langid = pytest.mark.skipif(find_spec("py3langid") is None, reason="py3langid is not installed")


@pytest.mark.parametrize(
    ("text", "wanted", "share"),
    [
        ("We add the two numbers.", "en", 1.0),
        ("We add the two 数字 here.", "en", 5 / 7),  # a Han letter counts as a word
        ("我们 use 这个 method", "zh", 4 / 6),
        ("これは数です so", "ja", 6 / 7),
        ("これは数です", "zh", 1 / 6),
        ("Сложим числа and stop", "ru", 2 / 4),
        ("и в я", "ru", 1.0),  # words of one letter
        ("두 수를 더하면 seven", "ko", 3 / 4),
        ("हिन्दी में सोचें now", "hi", 3 / 4),  # vowel signs are marks, not the end of a word
        ("שני מספרים", "he", 1.0),
        ("نجمع العددين then", "ar", 2 / 3),
        ("Οι δύο αριθμοί", "el", 1.0),
        ("ผลรวม is", "th", 5 / 6),
        ("Don't stop", "en", 1.0),
        ("Élan naïf", "fr", 1.0),
    ],
)
def test_words_by_their_script(text, wanted, share):
    assert language_share(text, wanted) == pytest.approx(share)


@pytest.mark.parametrize(
    "text", ["", "2x + 3 = 7", "x y α β", "$数字$ and \\(数\\) or \\[数\\]", "\\frac{1}{2} <b>", "$$数$$", "  \n"]
)
def test_what_is_no_word_does_not_count(text):
    assert language_share(text, "en") == 1.0


def test_only_the_thinking_counts():
    assert language_share("we think</think> <answer> 数字 </answer>", "en") == 1.0
    assert language_share("数字</think> we answer", "en") == 0.0
    assert language_share("<think>we think", "en") == 1.0


def test_a_formula_without_an_end_hides_nothing():
    assert language_share("costs $5 数字", "en") == 1 / 3
    assert language_share("$数$ is $5 数字", "en") == 1 / 3


def test_every_language_has_a_script():
    assert set(SCRIPTS) == set(get_args(Language))
    assert set(get_args(LatinLanguage)) == {name for name, scripts in SCRIPTS.items() if scripts == {"LATIN"}}


@pytest.mark.parametrize(
    "text", ["\\(" * 50_000, "$" * 100_001, "<a" * 50_000, "\\boxed{" * 20_000, "数a" * 50_000, "a\u0301" * 50_000]
)
def test_odd_text_does_not_take_the_square_of_its_length(text):
    assert 0 <= language_share(text, "en") <= 1


# --- py3langid


SENTENCES = {
    "de": "Wir addieren die beiden Zahlen und erhalten das Ergebnis.",
    "en": "We add the two numbers and get the result.",
    "es": "Sumamos los dos números y obtenemos el resultado.",
    "fr": "Nous additionnons les deux nombres et obtenons le résultat.",
    "it": "Sommiamo i due numeri e otteniamo il risultato.",
    "nl": "We tellen de twee getallen op en krijgen het resultaat.",
    "pt": "Somamos os dois números e obtemos o resultado.",
}


@needs_py3langid
@pytest.mark.parametrize("wanted", SENTENCES)
def test_py3langid_tells_latin_languages_apart(wanted):
    assert set(SENTENCES) == set(get_args(LatinLanguage))
    shares = {name: language_share(text, wanted, detector="py3langid") for name, text in SENTENCES.items()}
    assert shares == {name: float(name == wanted) for name in SENTENCES}
    assert language_share(SENTENCES["de"], "en") == 1.0, "which its script does not"


@needs_py3langid
def test_sentences_are_weighed_by_their_words():
    text = f"{SENTENCES['de']} Ja gut. {SENTENCES['en']} 数字"  # 9 German, 2 too few to ask, 9 English, 2 Han
    assert language_share(text, "de", detector="py3langid") == pytest.approx(11 / 22)
    assert language_share(text, "en", detector="py3langid") == pytest.approx(11 / 22)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(language.importlib.util, "find_spec", lambda name: None)
    check_detector("script")
    with pytest.raises(RlvrError, match=r"py3langid is not installed\.\n.*\[language\]"):
        check_detector("py3langid")
