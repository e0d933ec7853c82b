"""Print whole rollouts for reading, through a pager on a terminal.

Enters: rows of the query `failures` or `rollouts`. Leaves: paragraphs on stdout.
"""

import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

from rlvr_cli.terminal.console import one_line, rich_console, shortened, write_text
from rlvr_cli.text import filled_in, printable
from rlvr_cli.types import Table

PLACEHOLDER = "{question}"
MAX_CASE_CHARACTERS = 3000  # per text of a case; the middle of a longer text is left out
CASE_COLUMNS = {
    *("run_id", "step", "example_id", "sample_index", "category", "failure_kind", "why", "ground_truth"),
    *("extracted_answer", "num_response_tokens", "finish_reason", "prompt", "response"),
}

_ANSWER = re.compile(r"(<answer>.*?</answer>|\\boxed\{[^{}]*\})", re.DOTALL)


def print_cases(result: Table, *, templates: Mapping[str, str] | None = None) -> None:
    """Print rollouts one below the other: run and step, why it failed, ground truth, extracted answer, prompt, response.

    Where the prompt is made from a known template, the template stands once, at the beginning, and the case has the question.

    On a terminal the answer is highlighted, and output longer than the screen goes through a pager. The middle of a
    long text is replaced by the number of characters left out.

    Args:
        result: the rows of the query `failures` or `rollouts`, with the columns `CASE_COLUMNS`.
        templates: run id -> the template of its prompts, in which `{question}` stands for the question.
    """
    cases = [_with_question(case, (templates or {}).get(case["run_id"], "")) for case in result.records()]
    used = dict.fromkeys(template for _, template in cases if template)
    shown = [list(_template(template)) for template in used]
    shown += [list(_case(i, case)) for i, (case, _) in enumerate(cases, start=1)]
    if not sys.stdout.isatty():
        return write_text(sys.stdout, "".join(map(_plain_case, shown)))
    page = io.StringIO()
    for lines in shown:
        _print_case(lines, page)
    _page(page.getvalue())


def _with_question(case: dict[str, Any], template: str) -> tuple[dict[str, Any], str]:
    """Return the case with its question in place of its prompt, and the template; without it if the prompt is not made from it."""
    question = filled_in(str(case["prompt"]), template, placeholder=PLACEHOLDER)
    if question is None or template == PLACEHOLDER:
        return case, ""
    return case | {"question": question}, template


def _template(template: str) -> Iterator[list[tuple[str, str]]]:
    yield [(f"prompt, where {PLACEHOLDER} stands for the question of a case", "cyan")]
    yield [(printable(shortened(template, MAX_CASE_CHARACTERS)), "")]
    yield [("", "")]


def _case(number: int, case: Mapping[str, Any]) -> Iterator[list[tuple[str, str]]]:
    """Yield the paragraphs of a case, each a list of (printable text, rich style)."""
    place = f"step {case['step']}, example {case['example_id']}, sample {case['sample_index']}"
    yield [(one_line(f"{number}. {case['run_id']} {place}"), "bold")]
    facts = [case["category"], case["failure_kind"], f"{case['num_response_tokens']} tokens"]
    yield [(one_line(", ".join([*filter(None, facts), f"finished by {case['finish_reason']}"])), "dim")]
    for label, name in (("why", "why"), ("truth", "ground_truth"), ("extracted", "extracted_answer")):
        value = "(nothing)" if case[name] in (None, "") else one_line(shortened(str(case[name]), MAX_CASE_CHARACTERS))
        yield [(f"{label:<10}", "cyan"), (value, "")]
    for name in ("question" if "question" in case else "prompt", "response"):
        yield [(name, "cyan")]
        text = printable(shortened(str(case[name]), MAX_CASE_CHARACTERS))
        styles = ("", "bold green" if name == "response" else "")
        # The split alternates between other text and answers.
        yield [(piece, styles[i % 2]) for i, piece in enumerate(_ANSWER.split(text))]
    yield [("", "")]


def _page(text: str) -> None:
    """Write a text to the terminal; if it is longer than the screen and stdin is a terminal, through $PAGER (or less)."""
    import shlex
    import shutil
    import subprocess

    command = shlex.split(os.environ.get("PAGER", "less"))  # PAGER="" turns paging off
    long = text.count("\n") >= shutil.get_terminal_size().lines
    person = sys.stdin is not None and sys.stdin.isatty()
    if not (long and person and command and shutil.which(command[0])):
        return write_text(sys.stdout, text)
    sys.stdout.flush()
    environment = {
        "LESS": "FRX",
        **os.environ,
    }  # F: quit if it fits on one screen; R: pass colors; X: keep it on the screen
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as pager:
        assert pager.stdin is not None
        with suppress(OSError, KeyboardInterrupt), pager.stdin:  # the user quit the pager early
            pager.stdin.write(text.encode(sys.stdout.encoding, "backslashreplace"))
        while pager.poll() is None:
            with suppress(KeyboardInterrupt):  # Ctrl-C is for the pager
                pager.wait()


def _print_case(lines: Sequence[Sequence[tuple[str, str]]], page: TextIO) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console = rich_console(page)
    for number, line in enumerate(lines):
        console.print(Padding(Text.assemble(*line), (0, 0, 0, 2 if _is_quoted(number, lines) else 0)))


def _plain_case(lines: Sequence[Sequence[tuple[str, str]]]) -> str:
    texts = ["".join(text for text, _ in line) for line in lines]
    return "".join(
        (re.sub(r"(?m)^(?=.)", "  ", text) if _is_quoted(number, lines) else text) + "\n"
        for number, text in enumerate(texts)
    )


def _is_quoted(number: int, lines: Sequence[Sequence[tuple[str, str]]]) -> bool:
    """Whether a paragraph is the template, the prompt or the response; these are indented, so that they cannot imitate the next case."""
    return number in (len(lines) - 4, len(lines) - 2)
