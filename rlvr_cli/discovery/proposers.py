"""Proposers that need no model: each answers a prompt as a model would, through the same interface.

Enters: requests. Leaves: completions whose text has a program in a block of code.
"""

import ast
import random
import re
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from rlvr_cli.data.files import BadRow, file_rows
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.answers.extraction import fenced, last_code_block
from rlvr_cli.runs.storage.files import shown
from rlvr_cli.types import Completion, Request, SamplingParams

_PARAMETER = re.compile(r"^([A-Z][A-Z0-9_]*) = (.+?)  # one of (.+)$", re.MULTILINE)
Answer = Callable[[Request, int], str]  # (request, seed) -> the text of the response


class Proposer:
    """A `Sampler` without a model."""

    seeding = "per-request"
    policy_version = 0
    notes: tuple[str, ...] = ()
    worked_seconds = None
    arrived: tuple[Completion, ...] = ()

    def __init__(self, engine: str, answer: Answer) -> None:
        """
        Args:
            engine: its name: "mutate" or "replay".
        """
        self.engine, self._answer = engine, answer

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Generator[Completion]:
        for index, request in enumerate(requests):
            for sample, seed in enumerate(request.seeds):
                text = self._answer(request, seed)
                yield Completion(index, sample, text, (), (), (), 0, 0, "stop", "eos", None)

    def load_weights(self, policy: Any, policy_version: int) -> None:
        raise AssertionError("a proposer without a model has no weights")

    def sleep(self) -> None:
        """Do nothing: there is no device memory."""

    def close(self) -> None:
        """Do nothing: there are no processes."""


def mutate() -> Proposer:
    """A proposer that changes one parameter of the last program in the prompt."""
    return Proposer("mutate", lambda request, seed: _answer(request.prompt, seed))


def _answer(prompt: str, seed: int) -> str:
    return f"{fenced(mutated(last_code_block(prompt) or '', seed=seed))}\n"


def mutated(program: str, *, seed: int) -> str:
    """Give one parameter, a line `NAME = value  # one of ...`, another of its values.

    Raises:
        RlvrError: the program has no parameter with two values.
    """
    generator = random.Random(seed)
    lines = [match for match in _PARAMETER.finditer(program) if len(_choices(match)) > 1]
    if not lines:
        raise RlvrError(
            "--proposer mutate finds no parameter in the program.",
            "Mark some in the program to start from, such as the line: NORM = 4  # one of 2, 3, 4",
        )
    chosen = generator.choice(lines)
    value = generator.choice([choice for choice in _choices(chosen) if choice != chosen[2]])
    return f"{program[: chosen.start(2)]}{value}{program[chosen.end(2) :]}"


def _choices(parameter: re.Match[str]) -> list[str]:
    """The values of a parameter line, as they are written; none if they are no literals."""
    try:
        values = ast.parse(f"[{parameter[3]}]", mode="eval").body
    except (SyntaxError, ValueError):
        return []
    assert isinstance(values, ast.List)
    written = [ast.get_source_segment(f"[{parameter[3]}]", value) for value in values.elts]
    literal = all(isinstance(value, ast.Constant | ast.UnaryOp) for value in values.elts)
    return [text for text in written if text is not None] if literal else []


def replay(responses: Sequence[str]) -> Proposer:
    """A proposer that answers attempt i with the i-th response. A request's name is the number of its attempt."""
    return Proposer("replay", lambda request, seed: responses[int(request.name)])


def read_responses(path: Path) -> list[str]:
    """Read the responses of --replay-from: the field `response` of each row.

    Raises:
        RlvrError: the file cannot be read, a row has no response, or there is no row.
    """
    responses = []
    for row in file_rows(path, like='{"response": …}'):
        if isinstance(row, BadRow):
            raise RlvrError(str(row), row.hint)
        response = row.values.get("response")
        if not isinstance(response, str):
            raise RlvrError(f"{row.where}: there is no text in the field response.", 'Write {"response": "..."}.')
        responses.append(response)
    if not responses:
        raise RlvrError(f"{shown(path)} has no rows.", 'Write a line {"response": "..."} for each attempt.')
    return responses
