"""A user's own grader: `path/to/file.py:function`, called as `function(response, ground_truth)`; it returns a reward, or a dict of them.

A function with one more parameter, `example`, also gets the example, as a dict with the keys `id`, `question`,
`prompt`, `ground_truth`, `response`, `solution` and `turns` (the last three are the dataset's own trace). Unknown fields are
None: of a finished run that is graded again, the question is what stands in its prompt in the place of the template's {question}.

Enters: the specification. Leaves: a grading function. The file is the user's own code and runs with the user's rights;
`check` reads it without running it, `load` runs it.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, SupportsFloat

from rlvr_cli import user_code
from rlvr_cli.types import KEPT_CHARACTERS, Example, Grade

GRADER = user_code.Role(
    "grader", 2, "(response: str, ground_truth: str) -> float | dict[str, float]", optional_parameter="example"
)


class BadGrade(TypeError):
    """The user's function returned something that is neither a finite number nor a dictionary of finite rewards."""


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
        return grade_of(function(response, ground_truth, **given))

    grade.__wrapped__ = function  # type: ignore[attr-defined]  # for `error_detail`
    return with_example(grade) if wants_example(function) else grade


def error_detail(error: BaseException, spec: str, function: Callable[..., Any]) -> str:
    """Return the text of an exception that a grader raised, after FILE:LINE if the grader is a user's function.

    Args:
        function: of `load`, for a user's function.
    """
    text = user_code.text_of(error)
    if not user_code.is_file_spec(spec):
        return text
    where = user_code.location(spec, inspect.unwrap(function), error=error)
    return f"{where}: {text}" if text else where


def wants_example(function: Callable[..., Any]) -> bool:
    """Whether a grading function asks for the example."""
    return user_code.has_optional_parameter(function, GRADER)


def with_example(grade: Callable[..., Grade]) -> Callable[..., Grade]:
    """Return a grader that takes the example as its third argument, also by position as the workers send it.

    Called without one, it passes on an example of which only the ground truth is known.
    """

    def grade_with_example(response: str, ground_truth: str, example: Mapping[str, Any] | None = None) -> Grade:
        return grade(response, ground_truth, example=example or example_of_truth(ground_truth))

    grade_with_example.__wrapped__ = grade  # type: ignore[attr-defined]  # for `error_detail`
    return grade_with_example


def example_of_truth(ground_truth: str) -> dict[str, Any]:
    """The fields of an example of which only the ground truth is known; all others are None."""
    return dict.fromkeys(field.name for field in fields(Example)) | {"ground_truth": ground_truth}


def grade_of(returned: Any) -> Grade:
    """Convert what a user's grader returned to a `Grade`.

    A number, also one of numpy or torch, is the reward, and so is a dictionary's `reward` alone: the format and answer
    rewards stay None, the category is `reward_only`. With `format_reward` or `answer_reward`, a missing `reward` is
    `answer_reward`, a missing `answer_reward` is `reward`, and a missing `format_reward` is 1: a grader without a format
    rule never fails the format. The strings `failure_kind` (only of a reward of at most 0.5) and `extracted_answer` are
    kept, up to 1,000 characters of each.

    Raises:
        BadGrade: it is neither a number nor a dictionary, lacks both rewards, or has a reward that is not a finite number.
    """
    if not isinstance(returned, dict):
        if isinstance(returned, str | bytes) or not isinstance(returned, SupportsFloat):
            raise BadGrade(f"it returned {_described(returned)}, not a number or a dictionary of rewards")
        returned = {"reward": returned}
    rewards = {
        key: _reward(returned[key], key)
        for key in ("format_reward", "answer_reward", "reward")
        if returned.get(key) is not None
    }
    if "reward" not in rewards and "answer_reward" not in rewards:
        keys = ", ".join(map(str, list(returned)[:8])) or "nothing"
        raise BadGrade(f"it returned a dictionary with neither reward nor answer_reward: it has {keys}")
    kind, extracted = returned.get("failure_kind"), returned.get("extracted_answer")
    kind = kind[:KEPT_CHARACTERS] if isinstance(kind, str) else None
    extracted = extracted if isinstance(extracted, str) else None
    reward = rewards.get("reward", rewards.get("answer_reward", 0.0))
    if rewards.keys() == {"reward"}:
        return Grade(None, None, reward, extracted, None if reward > 0.5 else kind or "low_reward")
    format_reward = rewards.get("format_reward", 1.0)
    kind = None if reward > 0.5 else kind or ("wrong_answer" if format_reward > 0.5 else "no_format")
    return Grade(format_reward, rewards.get("answer_reward", reward), reward, extracted, kind)


def _reward(value: Any, key: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadGrade(f"the {key} that it returned is {_described(value)}, not a number") from error
    if not math.isfinite(number):
        raise BadGrade(f"the {key} that it returned is {number}, not a finite number")
    return number


def _described(value: Any) -> str:
    """A value for an error: its text, shortened, and its type."""
    try:
        text = repr(value)
    except Exception:  # it is the user's own object, or nested too deeply
        return f"an object of type {type(value).__name__}"
    text = text if len(text) <= 200 else f"{text[:200]}…"
    return "None" if value is None else f"{text} ({type(value).__name__})"
