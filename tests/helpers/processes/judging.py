"""A judge for tests: an endpoint that grades as it is told, and rubrics for it."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from endpoint import Reply
from rlvr_cli.process import StopRequest

RUBRIC = """scale: 1-10

How good is this response?

Question: {question}
Truth: {ground_truth}
<response>{response}</response>

Reason, then write the score from 1 to 10 in the last line.
"""
PAIRS = """scale: A/B/tie

Which response to {question} is better?
<first>{response_a}</first>
<second>{response_b}</second>
"""


def said(text: str, finish: str = "stop", **more: Any) -> Reply:
    """A chat's reply."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish, **more}
    return Reply({"choices": [choice], "usage": {"prompt_tokens": 50, "completion_tokens": 5}})


def asked(body: dict) -> str:
    """The text that a request asks."""
    return body["messages"][0]["content"]


def response_in(body: dict) -> str:
    """The response that the rubric shows."""
    (found,) = re.findall(r"<response>(.*)</response>", asked(body), re.DOTALL)
    return found


def scoring(score_of: Callable[[str], object]) -> Callable[[dict], Reply]:
    """A judge that gives the response of `RUBRIC` this score."""
    return lambda body: said(f"I read it.\n\n**Score: {score_of(response_in(body))}/10**\n")


@contextmanager
def answers_until(stop: StopRequest, text: int, reply: Reply) -> Iterator[Callable[[dict], Reply]]:
    """A judge that hangs on the text that arrives first, answers the next ones, and stops the command when it is asked text number `text`.

    With two requests at a time, the ones between them, `text` - 1, are answered then. It hangs until this ends.
    """
    asked_for, ended = count(), threading.Event()

    def answer(body: dict) -> Reply:
        number = next(asked_for)
        stop.requested = stop.requested or number == text
        return replace(reply, after=ended if number in (0, text) else None)

    try:
        yield answer
    finally:
        ended.set()


def length_score(response: str) -> int:
    return 1 + len(response) % 10


def write_rubric(folder: Path, text: str = RUBRIC, name: str = "rubric.md") -> Path:
    path = folder / name
    path.write_text(text)
    return path
