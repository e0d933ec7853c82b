"""English words for numbers: `twenty-one`, `two dozen`."""

from fractions import Fraction

_MULTIPLIERS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MULTIPLIERS |= {"quadrillion": 10**15, "lakh": 10**5, "crore": 10**7, "dozen": 12, "score": 20, "gross": 144}
_COUNTED = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
NUMBER_WORDS = {word: number for number, word in enumerate(_COUNTED.split())}
NUMBER_WORDS |= {word: 10 * number for number, word in enumerate(_TENS.split(), 2)}


def factor_of(word: str) -> int | None:
    """What a word such as `thousand` or `dozens` multiplies by, else None."""
    return _MULTIPLIERS.get(word) or _MULTIPLIERS.get(word.removesuffix("s"))


def number_word(text: str) -> Fraction | None:
    """The number that English words spell, else None: up to 100, or that many dozens, thousands and so on."""
    words = text.replace("-", " ").split()
    sign = -1 if words[:1] in (["negative"], ["minus"]) else 1
    if len(words) > 1 and words[1] in _MULTIPLIERS and words[0] in ("a", "an"):
        words = words[1:]
    factor = factor_of(words[-1]) if words else None
    if factor:
        count = number_word(" ".join(words[:-1])) if words[:-1] else Fraction(1)
        return None if count is None else count * factor
    total = 0
    for word in words[sign < 0 :]:
        value = NUMBER_WORDS.get(word)
        if value is None or (total and (total % 10 or not 0 < value < 10)):
            return None
        total += value
    return Fraction(sign * total) if words[sign < 0 :] else None
