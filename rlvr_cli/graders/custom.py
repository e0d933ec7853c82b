"""A user's own grader: `path/to/file.py:function`, called as `function(response, ground_truth) -> dict[str, float]`.

A function with one more parameter, `example`, also gets the example, as a dict with the keys `id`, `question`,
`prompt`, `ground_truth`, `response` and `solution` (the last two are the dataset's own trace). Unknown fields are
None: a finished run that is graded again has stored no questions, only the prompts made from them.

Enters: the specification. Leaves: a grading function. The file is the user's own code and runs with the user's rights;
`check` reads it without running it, `load` runs it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from rlvr_cli import user_code
from rlvr_cli.types import KEPT_CHARACTERS, Example, Grade

GRADER = user_code.Role(
    "grader", 2, "(response: str, ground_truth: str) -> dict[str, float]", optional_parameter="example"
)


class BadGrade(TypeError):
    """The user's function returned something that is not a dictionary of finite rewards."""


def check(spec: str) -> None:
    """Check that the file defines the function, without running it. Raises RlvrError, see `user_code.find`."""
    user_code.find(spec, GRADER)


def load(spec: str) -> Callable[[str, str], Grade]:
    """Run the file and return its function as a grader.

    Raises:
        RlvrError: see `user_code.load`.
    """
    function = user_code.load(spec, GRADER)

    def grade(response: str, ground_truth: str, **given: Any) -> Grade:
        return grade_from_dict(function(response, ground_truth, **given))

    return with_example(grade) if wants_example(function) else grade


def wants_example(function: Callable[..., Any]) -> bool:
    """Whether a grading function asks for the example."""
    return user_code.has_optional_parameter(function, GRADER)


def with_example(grade: Callable[..., Grade]) -> Callable[..., Grade]:
    """Return a grader that takes the example as its third argument, also by position as the workers send it.

    Called without one, it passes on an example of which only the ground truth is known.
    """

    def grade_with_example(response: str, ground_truth: str, example: Mapping[str, Any] | None = None) -> Grade:
        return grade(response, ground_truth, example=example or example_of_truth(ground_truth))

    return grade_with_example


def example_of_truth(ground_truth: str) -> dict[str, Any]:
    """The fields of an example of which only the ground truth is known; all others are None."""
    return dict.fromkeys(field.name for field in fields(Example)) | {"ground_truth": ground_truth}


def grade_from_dict(returned: Any) -> Grade:
    """Convert the dictionary that a user's grader returned to a `Grade`.

    A missing `reward` defaults to `answer_reward`, a missing `answer_reward` to `reward`, and a missing `format_reward`
    to 1: a grader without a format rule never fails the format. The strings `failure_kind` (only of a reward of at most
    0.5) and `extracted_answer` are kept, up to 1,000 characters of each.

    Raises:
        BadGrade: it is not a dictionary, lacks both rewards, or has a reward that is not a finite number.
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
    extracted = extracted if isinstance(extracted, str) else None
    return Grade(format_reward, answer_reward, reward, extracted, kind and kind[:KEPT_CHARACTERS])
