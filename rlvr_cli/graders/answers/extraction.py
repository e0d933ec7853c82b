r"""Find the answer in a response.

Enters: a response. Leaves: the text of its final answer, or None. Linear in the length; only `candidates` reads a line as mathematics.
"""

import re
import textwrap
from collections.abc import Iterator

from rlvr_cli.graders.answers.notation import BOLD, FUNCTIONS, GREEK, SURE_THOUSANDS
from rlvr_cli.graders.answers.units import UNITS

OPEN_TAG, CLOSE_TAG = "<answer>", "</answer>"
_MAX_CANDIDATE = 2_000  # characters kept of an answer
_TAIL = 6_000  # characters at the end of a response that `candidates` and `last_number` search
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_STATED = re.compile(r"answer\s*+(?:\*\*\s*+)?(?:is|:|=)\s*+(?:\*\*)?:?\s*+(?P<answer>[^\n]{1,300})", re.IGNORECASE)
_HASHES = re.compile(r"####[ \t]*([^\n]{1,200})")
_DISPLAYED = re.compile(r"\$\$?([^$\n]{1,300})\$\$?|\\\((.{1,300}?)\\\)|\\\[(.{1,300}?)\\\]")
_DISPLAY_OF_LINES = re.compile(r"(\\\[|\$\$)[ \t]*\n([^\n]{1,300})\n[ \t]*(\\\]|\$\$)")
_SENTENCE_END = re.compile(r"(?<=[^\d\s.])\.(?:\s|$)|\.(?=\s+[A-Z])|\.\s*$")
_NUMBER = re.compile(
    r"(?<![\w.])-?\$?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?|\.[0-9]+)"
)
_IN_NOTATION = re.compile(r"[\^_{]\s*-?[\d.]+|[\d.]+\}")  # an exponent, an index, a part of a command
_INTRODUCTION = re.compile(r"\bis\b|(?<![<>!])=|(?<=[A-Za-z]):(?=\s)")
_LABEL = re.compile(r"\s*(?:[-*\u2022]|\([a-j]\))\s+(?=-?[\w$\\(.])")
_ALONE = re.compile(r"(?:^|[=,:]|[A-Za-z]{2})\s*(-?\$?[\d.,/]{0,20}\d)\s*$")  # the 5 of 5 = x
_FIRST_AMOUNT = re.compile(r"[-$\d.,/ ]*\d(?:(?:[mgLl]|[KMGT][Bb])?\b|%)")
_AMOUNT = re.compile(r"[-$\d.,/ ]*\d(?:[mgLl]| an? [a-z]+|%? ([A-Za-z]{2,}))")  # 900m, $5 a day, 8 GB, 5 cm
_THINKING = re.compile("</?think>")
_FENCE = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([^`\s]*+)[^`]*+")
_PYTHON = {"python", "py", "python3"}


def tagged_answer(response: str) -> str | None:
    """The text between the last `<answer>` and the first `</answer>` after it (or the end of the response)."""
    start = response.rfind(OPEN_TAG)
    if start < 0:
        return None
    start += len(OPEN_TAG)
    end = response.find(CLOSE_TAG, start)
    return response[start:] if end < 0 else response[start:end]


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}` whose brace is closed."""
    for match in reversed(list(_BOX.finditer(text))[-64:]):
        content = _closed(text, match.end())
        if content is not None:
            return content
    return None


def _closed(text: str, start: int) -> str | None:
    depth, index, end = 1, start, min(len(text), start + 20_000)
    while index < end:
        character = text[index]
        if character == "\\":
            index += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start:index]
        index += 1
    return None


def unboxed(answer: str) -> str | None:
    r"""An answer without its box; None if a box is opened but not closed."""
    if "\\boxed" in answer or "\\fbox" in answer:
        return last_boxed(answer)
    return answer


def without_thinking(text: str) -> str:
    """What follows the thinking: after the last `</think>`, and before a `<think>` that is not closed.

    Tags in a fenced block are the program's, such as those in its strings; but a `</think>` that begins a line ends the thinking
    if the block has no `<think>`: its fence was never closed.
    """
    start, end = 0, len(text)
    for at, is_end in _thinking_tags(text):
        if is_end:
            start, end = at + len("</think>"), len(text)
        else:
            end = min(end, at)
    return text[start:end]


def _thinking_tags(text: str) -> Iterator[tuple[int, bool]]:
    """The place of each tag of the thinking, and whether it is `</think>`."""
    fence, is_paired, at = "", False, 0
    for line in text.split("\n"):
        opened = None if fence else _FENCE.fullmatch(line.rstrip("\r"))
        tags = [(at + match.start(), match[0] == "</think>") for match in _THINKING.finditer(line)]
        if opened is not None:
            fence, is_paired = opened[1], False
        elif not fence:
            yield from tags
        elif _closes(line, fence):
            fence = ""
        elif line.lstrip().startswith("</think>") and not is_paired:
            fence = ""
            yield from tags
        else:
            is_paired = is_paired or any(not is_end for _, is_end in tags)
        at += len(line) + 1


def _closes(line: str, fence: str) -> bool:
    return line.strip().startswith(fence) and not line.strip().strip(fence[0])


def last_code_block(text: str) -> str | None:
    """The content of the last fenced block of Python after the thinking, else of the last one that names no language.

    A fence that is never closed ends with the text. None: there is no such block.
    """
    blocks: dict[bool, str] = {}  # whether it names Python -> the last one
    fence, named, other, lines = "", False, False, list[str]()
    for line in [*without_thinking(text).split("\n"), None]:
        if not fence:
            match = None if line is None else _FENCE.fullmatch(line.rstrip("\r"))
            if match is not None:
                fence, language, lines = match[1], match[2].lower(), []
                named, other = language in _PYTHON, language not in {*_PYTHON, ""}
        elif line is None or _closes(line, fence):
            if not other:
                blocks[named] = textwrap.dedent("\n".join(lines))
            fence = ""
        else:
            lines.append(line.rstrip("\r"))
    return blocks.get(True, blocks.get(False))


def fenced(program: str) -> str:
    """A program as a block of code, whose fence is longer than any in the program."""
    fence = max(["``", *re.findall("`{3,}", program)], key=len) + "`"
    return f"{fence}python\n{program.rstrip()}\n{fence}"


def candidates(response: str) -> list[str]:
    """Find the answer leniently: in tags, else in a box, after ####, after `answer is`, displayed, or in the last line.

    Returns:
        One text, or none. Of a last line that cannot be read it is the last number; a short one without a number is taken whole.
    """
    tail = BOLD.sub(r"\1", _DISPLAY_OF_LINES.sub(r"\1\2\3", response[-_TAIL:]))
    found: list[str] = []
    tagged = tagged_answer(tail)
    if tagged is not None and tagged.strip():
        found.append(unboxed(tagged) or tagged)
    elif (boxed := last_boxed(tail)) is not None and boxed.strip():
        found.append(boxed)
    elif (hashed := _last(_HASHES, tail)) is not None:
        found.append(hashed[1])
    elif (stated := _last(_STATED, tail)) is not None:
        found.append(_SENTENCE_END.split(stated["answer"], maxsplit=1)[0].rstrip("* "))
    else:
        last_line = tail.strip().rpartition("\n")[2]
        displayed = _last(_DISPLAYED, last_line)
        if displayed is not None:
            found.append(next(group for group in displayed.groups() if group))
        elif (stated_last := _stated_in(last_line)) is not None:
            found.append(stated_last)
    return [candidate.strip()[:_MAX_CANDIDATE] for candidate in found if candidate.strip()]


def _stated_in(line: str) -> str | None:
    """What follows the last `is`, `=` or colon of a line, or else all of it, if it can be read as mathematics; else its last number."""
    from rlvr_cli.graders.answers.reading.reader import has_prose  # most graders do without
    from rlvr_cli.graders.answers.reading.readings import readings

    line = line[label.end() :] if (label := _LABEL.match(line)) else line
    introduced = _last(_INTRODUCTION, line)
    if introduced is not None:
        before, (part, *others) = line[: introduced.start()], _SENTENCE_END.split(line[introduced.end() :])
        part = part.strip().rstrip("!" if introduced[0] == "is" else "")
        if introduced[0] == "=" and re.fullmatch("[A-Za-z]", part) and (named := _ALONE.search(before)):
            return named[1]
        if not re.search(r"\d", "".join(others)) and not all(map(has_prose, readings(part))):
            if not _is_counted(part):
                return part
            first = None if re.search(r", |\b(?:or|which)\b", part) else _FIRST_AMOUNT.match(part)
            return _number_in(part if first is None else first[0])  # 104 games after 3 years; 4.2, which rounds to 4
    read = readings(line)
    if not _is_counted(line) and not all(map(has_prose, read if "\\" in line else read[:1])):
        return line
    return _number_in(line) or (line if len(line) <= 100 else None)


def _is_counted(text: str) -> bool:
    """Whether a text is a number of something in plain words, such as `27 pies`, which are no mathematics."""
    words = re.findall("[A-Za-z]+", text)
    if not _FIRST_AMOUNT.match(text) or re.search(r"[\\^]|\d (?:or|and|to)\b", text):
        return False
    if any(word == "pi" or word in FUNCTIONS | GREEK - UNITS.keys() for word in words):
        return False
    amount = _AMOUNT.fullmatch(text.rstrip(" ."))
    return any(len(word) > 3 for word in words) or (amount is not None and amount[1] not in UNITS)


def _number_in(text: str) -> str | None:
    """The last number of a text, a mixed one such as `1 1/2` included."""
    number = last_number(_IN_NOTATION.sub(" ", SURE_THOUSANDS.sub(",", text)))
    mixed = re.search(rf"(?<![\w.,/])\d+ {re.escape(number)}", text) if number and "/" in number else None
    return number if mixed is None else mixed[0]


def last_number(text: str) -> str | None:
    """The last number in a text, as written: with its thousands commas (of `5{,}000`, too), dollar sign, decimal point or denominator."""
    match = _last(_NUMBER, SURE_THOUSANDS.sub(",", text[-_TAIL:].replace("\u2212", "-")))
    return None if match is None else match[0]


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for match in pattern.finditer(text):
        found = match
    return found
