"""A user's own grader: `path/to/file.py:function`, called as `function(response, ground_truth) -> dict[str, float]`.

A function with one more parameter, `example`, gets the example that is answered as well: a dict of its fields, `id`, `question`,
`prompt`, `ground_truth`, `response` and `solution` (these two: of its trace). What is not known is None: a finished run that is
graded again holds no question, only the prompt that was made of it.

Enters: the specification. Leaves: a grading function. The file is the user's own code and runs with the user's rights;
`check` reads it without running it, `load` runs it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from rlvr_cli import user_code
from rlvr_cli.types import Example, Grade

GRADER = user_code.Role(
    "grader", 2, "(response: str, ground_truth: str) -> dict[str, float]", optional_parameter="example"
)


class BadGrade(TypeError):
    """The user's function returned something that is not a dictionary of finite rewards."""


def check(spec: str) -> None:
    """Look at the source, which runs nothing. Raises RlvrError, see `user_code.find`."""
    user_code.find(spec, GRADER)


def load(spec: str) -> Callable[[str, str], Grade]:
    """Run the file and return its function as a grader.

    Raises:
        RlvrError: see `user_code.load`.
    """
    function = user_code.load(spec, GRADER)

    def grade(response: str, ground_truth: str) -> Grade:
        return grade_of(function(response, ground_truth))

    def grade_with_example(response: str, ground_truth: str, example: Mapping[str, Any] | None = None) -> Grade:
        return grade_of(function(response, ground_truth, example=example or example_of_truth(ground_truth)))

    return grade_with_example if wants_example(function) else grade


def wants_example(function: Callable[..., Any]) -> bool:
    """Whether a grading function asks for the example."""
    return user_code.has_optional_parameter(function, GRADER)


def example_of_truth(ground_truth: str) -> dict[str, Any]:
    """The fields of an example of which nothing else is known."""
    return dict.fromkeys(field.name for field in fields(Example)) | {"ground_truth": ground_truth}


def grade_of(returned: Any) -> Grade:
    """A user's dictionary as a `Grade`.

    `reward` is the reward; without it `answer_reward` is. A missing `answer_reward` is the reward, a missing
    `format_reward` is 1: a grader that has no notion of a format never fails it. The strings `failure_kind` and
    `extracted_answer` are kept.

    Raises:
        BadGrade: it is no dictionary, has no reward, or a reward that is not a finite number.
    """
    if not isinstance(returned, dict):
        raise BadGrade(f"a grader returns a dictionary, not {type(returned).__name__}")
    rewards: dict[str, float] = {}
    for key in ("format_reward", "answer_reward", "reward"):
        if returned.get(key) is None:
            continue
        try:
            rewards[key] = float(returned[key])
        except (TypeError, ValueError) as error:
            raise BadGrade(f"{key} is {type(returned[key]).__name__}, not a number") from error
        if not math.isfinite(rewards[key]):
            raise BadGrade(f"{key} is {rewards[key]}")
    if "reward" not in rewards and "answer_reward" not in rewards:
        raise BadGrade("neither reward nor answer_reward in " + ", ".join(map(str, list(returned)[:8])))
    reward = rewards.get("reward", rewards.get("answer_reward", 0.0))
    answer_reward = rewards.get("answer_reward", reward)
    format_reward = rewards.get("format_reward", 1.0)
    kind, extracted = returned.get("failure_kind"), returned.get("extracted_answer")
    if reward > 0.5:
        kind = None
    elif not isinstance(kind, str):
        kind = "wrong_answer" if format_reward > 0.5 else "malformed_tags"
    return Grade(format_reward, answer_reward, reward, extracted[:1_000] if isinstance(extracted, str) else None, kind)
