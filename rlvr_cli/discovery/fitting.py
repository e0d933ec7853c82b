"""How much of long programs a prompt shows, so that the prompt and its response fit the model's context.

Enters: how to write a prompt with so many characters of each program, and whether a text fits. Leaves: the prompt.
"""

import re
from collections.abc import Callable

SHOWN_CHARACTERS = 20_000  # of a program in a prompt, if the context holds it
_STEP = 16  # characters: how exactly the most that fits is found
_PIECES = re.compile(r" ?[A-Za-z]{1,4}|\s+|.", re.DOTALL)


class Fitting:
    """Writes prompts that fit, and says once that programs are shortened.

    Args:
        fits: whether the context holds a prompt and its response.
    """

    def __init__(self, fits: Callable[[str], bool], report: Callable[[str], None]) -> None:
        self._fits, self._report, self._said = fits, report, False

    def prompt(self, write: Callable[[int], str]) -> str:
        """Return `write(SHOWN_CHARACTERS)` or, if that is too long, what it writes with the most characters that fit."""
        if self._fits(whole := write(SHOWN_CHARACTERS)):
            return whole
        least, beyond = 0, SHOWN_CHARACTERS
        while beyond - least > _STEP:
            middle = (least + beyond) // 2
            least, beyond = (middle, beyond) if self._fits(write(middle)) else (least, middle)
        if not self._said:
            self._said = True
            most = (
                f"only the first {least:,} characters of a program, or about as many"
                if least
                else "nothing of programs"
            )
            self._report(f"note: prompts show {most}: with --sampling-max-tokens the model's context may not hold more")
        return write(least)


def estimated_tokens(text: str) -> int:
    """About how many tokens a text has, rather too many: one for four letters, each digit and each sign, and a byte that is not ASCII."""
    return sum(1 if piece.isascii() else len(piece.encode()) for piece in _PIECES.findall(text))
