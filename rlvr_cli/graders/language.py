"""How much of a response's thinking is in one language, by its scripts or, between Latin languages, by py3langid (an extra).

Enters: a response. Leaves: the share of its words that are in the language.
"""

import functools
import importlib.util
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args

from rlvr_cli.config.grpo import Language, LanguageDetector, LatinLanguage
from rlvr_cli.errors import missing_extra

SCRIPTS: dict[Language, set[str]] = {
    "ar": {"ARABIC"},
    "el": {"GREEK"},
    "he": {"HEBREW"},
    "hi": {"DEVANAGARI"},
    "ja": {"CJK", "HIRAGANA", "KATAKANA"},
    "ko": {"HANGUL"},
    "ru": {"CYRILLIC"},
    "th": {"THAI"},
    "zh": {"CJK"},
    **{latin: {"LATIN"} for latin in get_args(LatinLanguage)},
}
_WITHOUT_SPACES = {"CJK", "HIRAGANA", "KATAKANA", "THAI"}  # each letter counts as a word
_VARIABLES = {"LATIN", "GREEK"}  # a single letter is a variable rather than a word
_FEWEST = 3  # words of a sentence whose language is asked for
_MATH = re.compile(r"\$\$?|\\[()\[\]]")  # begins or ends a formula
_COMMANDS = re.compile(r"\\[a-zA-Z]+|</?\w+>")
_SENTENCES = re.compile(r"[.!?;:\n。！？]+")


def check_detector(detector: LanguageDetector) -> None:
    """Raise RlvrError if the detector needs a package that is not installed."""
    if detector == "py3langid" and importlib.util.find_spec("py3langid") is None:
        raise missing_extra("py3langid", "language")


def language_share(response: str, language: Language, *, detector: LanguageDetector = "script") -> float:
    """Return the share of the words of a response's thinking that are in a language (DeepSeek-R1, 2025, section 2.3.2).

    The thinking is what stands before ``</think>``, else the whole response. Formulas, commands of LaTeX and tags are left out,
    and so are single Latin and Greek letters. A word is a run of letters of one script; in a script without spaces each letter
    counts. A word is in the language if its script is the language's. With py3langid, the Latin words of a sentence that has three
    or more count only if it takes the sentence for the language, among those of `LatinLanguage`.

    Returns:
        From 0 to 1; 1 for a thinking without a word.
    """
    thinking = _prose(response.partition("</think>")[0])
    right = total = 0
    for sentence in _SENTENCES.split(thinking) if detector == "py3langid" else (thinking,):
        words = _words(sentence)
        total += sum(words.values())
        latin_elsewhere = (
            detector == "py3langid" and words["LATIN"] >= _FEWEST and _identifier().classify(sentence)[0] != language
        )
        right += 0 if latin_elsewhere else sum(words[script] for script in SCRIPTS[language])
    return right / total if total else 1.0


def _prose(text: str) -> str:
    """The text without formulas, commands and tags. What follows the delimiter of a formula without an end is text."""
    parts = _MATH.split(text)
    outside = parts[::2] if len(parts) % 2 else [*parts[::2], parts[-1]]
    return _COMMANDS.sub(" ", " ".join(outside))


def _words(text: str) -> Counter[str]:
    """The number of words by script, of a text without formulas."""
    if text.isascii():
        return Counter(LATIN=len(re.findall("[a-zA-Z]{2,}", text)))
    words: Counter[str] = Counter()
    for script, length in _runs(text):
        if script in _WITHOUT_SPACES:
            words[script] += length
        elif length > 1 or script not in _VARIABLES:
            words[script] += 1
    return words


def _runs(text: str) -> Iterator[tuple[str, int]]:
    """The script and the number of letters of each run of letters of one script. A mark belongs to the letter before it."""
    script, length = "", 0
    for character in text:
        found = _script(character)
        if found == "mark":
            continue
        if found == script:
            length += 1
            continue
        if script:
            yield script, length
        script, length = found, 1
    if script:
        yield script, length


@functools.lru_cache(maxsize=65536)
def _script(character: str) -> str:
    """The first word of a letter's name in Unicode, such as LATIN; `mark` for a combining one, and empty for no letter."""
    category = unicodedata.category(character)
    if category[0] == "M":
        return "mark"
    return unicodedata.name(character, "OTHER").partition(" ")[0] if category[0] == "L" else ""


@functools.cache
def _identifier() -> Any:
    check_detector("py3langid")
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    identifier.set_languages(get_args(LatinLanguage))
    return identifier
