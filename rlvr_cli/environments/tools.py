"""Tools that the policy calls: in tags, `<NAME>argument</NAME>`, answered by `<out>result</out>`; or as chat models do.

Enters: functions by name. Leaves: an `Environment`. A call that fails is told to the policy, in the place of a result.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from rlvr_cli import user_code
from rlvr_cli.environments.interface import Reply
from rlvr_cli.errors import RlvrError
from rlvr_cli.process import memory_was_filled
from rlvr_cli.types import Example

Tool = Callable[[str], object]  # the text between the tags -> the result

TOOL = user_code.Role("tool", None, "(argument: str) -> str")


CALLED = {"called": True}  # what a process says when a call of several is answered


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

        def call() -> object:
            if not opened:
                raise ToolError(f"there is no <{name}> before </{name}>")
            return self._tools[name](argument)

        result, error = _outcome(call)
        return Reply(f"{self.marker}{result}</out>", role=name, error=error)


class ChatTools:
    """The environment of some tools that a chat model calls. A turn is the JSON of its calls: {name, arguments}, or {name, problem}.

    Attributes:
        called: is called when a call is answered.
    """

    gives_rewards = False
    stop = ()
    marker = ""

    def __init__(self, functions: Mapping[str, Callable[..., object]]) -> None:
        self._functions = functions
        self.called: Callable[[], None] = lambda: None

    def begin(self, example: Example, seed: int) -> str | None:
        """Nothing is to be prepared."""

    def answer(self, turn: str) -> Reply:
        """Answer all calls, one after the other."""
        replies = []
        for call in json.loads(turn):
            replies.append(self._answer(**call))
            self.called()
        return Reply(calls=tuple(replies))

    def _answer(self, name: str, arguments: Mapping[str, Any] | None = None, problem: str = "") -> Reply:
        def call() -> object:
            if problem:
                raise ToolError(problem)
            if name not in self._functions:
                raise ToolError(f"there is no tool {name}, only {', '.join(self._functions)}")
            return _called(self._functions[name], arguments or {})

        text, error = _outcome(call)
        return Reply(text, role=name if name in self._functions else "tool", error=error)


def schema_of(name: str, function: Callable[..., object]) -> dict[str, Any]:
    """What a chat model is told of a tool: the JSON schema of its signature and docstring.

    Raises:
        RlvrError: it lacks types or descriptions.
    """
    from transformers.utils.chat_template_utils import get_json_schema  # here: only chat models need it

    try:
        schema = get_json_schema(function)
    except Exception as problem:  # of several kinds, also for what a user's annotations mean
        raise RlvrError(
            f"The tool {name} cannot be described to a chat model: {problem}",
            "Give each parameter a type, and the function a docstring whose section `Args:` has a line `PARAMETER: what it is` for each.",
        ) from problem
    schema["function"]["name"] = name
    return schema


def load_function(spec: str) -> tuple[str, Callable[..., object]]:
    """Run the file of FILE.py:FUNCTION and return the tool's name and the function. Raises RlvrError: see `user_code.load`."""
    return spec.rpartition(":")[2], user_code.load(spec, TOOL)


def load_tool(spec: str) -> tuple[str, Tool]:
    """Run the file of FILE.py:FUNCTION and return the tool's name and the tool.

    A function with several parameters, or with one that is no text, gets them from a JSON object between the tags.

    Raises:
        RlvrError: see `user_code.load`.
    """
    name, function = load_function(spec)
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) == 1 and parameters[0].annotation in (str, "str", inspect.Parameter.empty):
        only = parameters[0]
        if only.kind is only.KEYWORD_ONLY:
            return name, lambda argument: function(**{only.name: argument})
        if only.kind is not only.VAR_KEYWORD:
            return name, function

    def call(argument: str) -> object:
        try:
            given: Any = json.loads(argument)
        except ValueError as problem:
            raise ToolError(f"the call is not JSON such as {_arguments(function)}: {problem}") from None
        if not isinstance(given, dict):
            raise ToolError(f"the call is not a JSON object such as {_arguments(function)}")
        return _called(function, given)

    return name, call


def _called(function: Callable[..., object], arguments: Any) -> object:
    """Call a function with arguments by name; they are checked before it runs."""
    signature = inspect.signature(function)
    named = [
        p.replace(kind=p.POSITIONAL_OR_KEYWORD) if p.kind is p.POSITIONAL_ONLY else p
        for p in signature.parameters.values()
    ]
    try:
        bound = signature.replace(parameters=named).bind(**arguments)
    except TypeError as problem:
        raise ToolError(f"the call is not JSON such as {_arguments(function)}: {problem}") from None
    bound.apply_defaults()  # by position, none may be left out before another
    return function(*bound.args, **bound.kwargs)


def _arguments(function: Callable[..., object]) -> str:
    names = ", ".join(f'"{name}": ...' for name in inspect.signature(function).parameters)
    return f"{{{names}}}"


def _outcome(call: Callable[[], object]) -> tuple[str, str | None]:
    """What a call gives, as a text; and that text again if it failed."""
    try:
        return str(call()), None
    except Exception as problem:  # whatever the tool raises; the policy may call it in another way
        if memory_was_filled(problem):  # perhaps by earlier calls: see `worker.serve`
            raise
        said = (
            str(problem)
            if isinstance(problem, ToolError)
            else f"{type(problem).__name__}: {user_code.text_of(problem)}"
        )
        return f"error: {said}", f"error: {said}"
