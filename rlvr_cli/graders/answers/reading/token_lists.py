"""Lists of tokens: brackets, what stands around them, and where to split them."""

from collections.abc import Callable

from rlvr_cli.graders.answers.notation import Token, word_set

Tokens = list[Token]

OPEN = {
    "(": ")",
    "[": "]",
    "{": "}",
    "\\{": "\\}",
    "\\langle": "\\rangle",
    "\\lfloor": "\\rfloor",
    "\\lceil": "\\rceil",
}
CLOSE = frozenset(OPEN.values())
_DISPLAYS = word_set("align aligned equation gather gathered center split")


def trimmed(tokens: Tokens) -> Tokens:
    """The tokens without punctuation at the ends and without braces or a display environment around all of them."""
    start, end = 0, len(tokens)
    while True:
        before = (start, end)
        while (
            start < end
            and tokens[start].text in (".", ",", ";", ":", "?", '"', "`", "...")
            and not (tokens[start].text == "..." and end - start == 1)
        ):
            start += 1
        while start < end and tokens[end - 1].text in (".", ",", ";", ":", "?", '"', "`", "\\\\"):
            end -= 1
        if start < end and tokens[end - 1].text == "!" and end - start > 1 and tokens[end - 2].kind == "text":
            end -= 1
        if end - start >= 2 and tokens[start].text == "{" and closing_index(tokens, start, end) == end - 1:
            start, end = start + 1, end - 1
        if (
            start < end
            and tokens[start].kind == "begin"
            and tokens[start].text in _DISPLAYS
            and tokens[end - 1].kind == "end"
        ):
            start, end = start + 1, end - 1
        if before == (start, end):
            return tokens[start:end]


def closing_index(tokens: Tokens, start: int, end: int) -> int:
    """The index of the bracket that closes the one at `start`; any closing bracket closes any opening one ([0, 1))."""
    depth = 0
    for index in range(start, end):
        token = tokens[index]
        if token.text in OPEN or token.kind == "begin":
            depth += 1
        elif token.text in CLOSE or token.kind == "end":
            depth -= 1
            if depth == 0:
                return index
    return -1


def split(tokens: Tokens, is_separator: Callable[[Token], bool]) -> list[Tokens]:
    """Split at the separators that are outside of all brackets."""
    parts: list[Tokens] = [[]]
    depth = 0
    for token in tokens:
        if token.text in OPEN or token.kind == "begin":
            depth += 1
        elif token.text in CLOSE or token.kind == "end":
            depth -= 1
        elif depth == 0 and is_separator(token):
            parts.append([])
            continue
        parts[-1].append(token)
    return parts


def merge_thousands(tokens: Tokens) -> Tokens:
    """Join `1` `,` `234` `,` `567` into one number: groups of three digits, without spaces, outside of brackets."""
    if not any(token.text == "," for token in tokens):
        return tokens
    out: Tokens = []
    index, depth, count = 0, 0, len(tokens)
    while index < count:
        token = tokens[index]
        if token.text in ("(", "[", "\\{"):
            depth += 1
        elif token.text in (")", "]", "\\}"):
            depth -= 1
        if token.kind == "num" and depth == 0:
            run = index + 1
            while (
                run + 1 < count
                and tokens[run].text == ","
                and tokens[run + 1].kind == "num"
                and not tokens[run + 1].gap
            ):
                run += 2
            groups = [tokens[at].text for at in range(index, run, 2)]
            if len(groups) > 1:
                whole = [group.partition(".")[0] for group in groups]
                if (
                    1 <= len(groups[0]) <= 3
                    and groups[0].isdigit()
                    and all(len(digits) == 3 for digits in whole[1:])
                    and all(group.isdigit() for group in groups[:-1])
                ):
                    out.append(Token("num", "".join(groups), token.gap))
                else:
                    out.extend(tokens[index:run])
                index = run
                continue
        out.append(token)
        index += 1
    return out
