r"""Layer L3: ask Math-Verify about notation that our own grammar does not know.

Enters: two texts. Leaves: True or False. The only module that imports the library `math_verify` (and, through it,
sympy), on first use.

Math-Verify's own time limits are signals, which work in the main thread only and cancel the caller's alarm, so they
are off: the caller must be able to kill the process, as `GraderPool` can. The texts given to Math-Verify are short and
free of towers of exponents, factorials and words. Texts that it is known to accept wrongly are refused beforehand: it
skips text, drops subscripts, takes an inequality for a number, and of other relations reads the last side.
"""

import importlib
import logging
import re
from functools import lru_cache
from typing import Any

from rlvr_cli.graders.answers.equivalence import readable
from rlvr_cli.graders.answers.notation import Unreadable, is_prose, tokens_of

_MAX_LENGTH = 200
_REFUSED = re.compile(
    r"!|\\(?:int|sum|prod|lim|text|mbox|begin|ldots|dots|cdots)|\.\.\.|\^\s*\{?\s*\(?\s*-?\d{4}|\^[^^]*\^[^^]*\^|\*\*|_"
    r"|\\(?:[a-zA-Z]*(?:arrow|harpoon)|(?:long)?mapsto|implies|not|neg|bmod|n(?:less|gtr|[lg]eq)|n?(?:mid|sim|cong|parallel|prec|succ))"
    r"|\\(?:to|perp|ni|ll|gg|subset|supset|doteq|therefore)\b"
)
_RELATION = re.compile(r"<|>|\\(?:leq?|geq?|neq?|lt|gt|in)\b|[≤≥≠∈]")


@lru_cache(maxsize=4_096)
def equal_by_math_verify(answer: str, truth: str) -> bool:
    """Whether Math-Verify finds the two equal; not called, and False, if our grammar reads both or one is refused."""
    answer, truth = answer.strip(), truth.strip()
    if not _askable(answer) or not _askable(truth) or (readable(answer) and readable(truth)):
        return False
    if bool(_RELATION.search(answer)) != bool(_RELATION.search(truth)):
        return False
    return _ask(answer, truth)


def _askable(text: str) -> bool:
    if not text or len(text) > _MAX_LENGTH or _REFUSED.search(text) or not re.search(r"\d|\\[a-zA-Z]", text):
        return False
    try:
        tokens = tokens_of(text)
    except Unreadable:
        return False
    return not any(t.kind in ("text", "bad") or (t.kind == "word" and is_prose(t.text)) for t in tokens)


def _ask(answer: str, truth: str) -> bool:
    library: Any = importlib.import_module("math_verify")  # the library, not our grader of that name
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs every text that it cannot parse

    def parsed(text: str) -> list[Any]:
        bare = text.strip("$ ")
        return library.parse(f"${bare}$", parsing_timeout=None, raise_on_error=False)

    return bool(library.verify(parsed(truth), parsed(answer), timeout_seconds=None, raise_on_error=False))
