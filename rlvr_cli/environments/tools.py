"""Tools that the policy calls in tags: `<NAME>argument</NAME>`, answered by `<out>result</out>`.

Enters: functions by name. Leaves: an `Environment`. A call that fails is told to the policy, in the place of a result.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from rlvr_cli import user_code
from rlvr_cli.environments.interface import Reply
from rlvr_cli.types import Example

Tool = Callable[[str], object]  # the text between the tags -> the result

TOOL = user_code.Role("tool", 1, "(argument: str) -> str")


class ToolError(Exception):
    """A call that cannot be answered, in words for the policy."""


class Tools:
    """The environment of some tools. It keeps nothing from call to call."""

    gives_rewards = False
    marker = "<out>"

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self.stop = tuple(f"</{name}>" for name in tools)

    def begin(self, example: Example, seed: int) -> str | None:
        """Nothing is to be prepared."""

    def answer(self, turn: str) -> Reply:
        """Call the tool whose closing tag ends the turn."""
        name = next(name for name, stop in zip(self._tools, self.stop, strict=True) if turn.endswith(stop))
        _, opened, argument = turn.removesuffix(f"</{name}>").rpartition(f"<{name}>")
        error = None
        try:
            if not opened:
                raise ToolError(f"there is no <{name}> before </{name}>")
            result = str(self._tools[name](argument))
        except Exception as problem:  # whatever the tool raises; the policy may call it in another way
            said = str(problem) if isinstance(problem, ToolError) else f"{type(problem).__name__}: {problem}"
            error = result = f"error: {said}"
        return Reply(f"{self.marker}{result}</out>", role=name, error=error)


def load_tool(spec: str) -> tuple[str, Tool]:
    """Run the file of FILE.py:FUNCTION and return the tool's name and the tool.

    A function with several parameters, or with one that is no text, gets them from a JSON object between the tags.

    Raises:
        RlvrError: see `user_code.load`.
    """
    function = user_code.load(spec, TOOL)
    name = spec.rpartition(":")[2]
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) == 1 and parameters[0].annotation in (str, "str", inspect.Parameter.empty):
        return name, function

    def call(argument: str) -> object:
        try:
            given: Any = json.loads(argument)
            bound = inspect.signature(function).bind(**given)
        except (ValueError, TypeError) as problem:
            names = ", ".join(f'"{parameter.name}": ...' for parameter in parameters)
            raise ToolError(f"the call is not JSON such as {{{names}}}: {problem}") from None
        return function(*bound.args, **bound.kwargs)

    return name, call
