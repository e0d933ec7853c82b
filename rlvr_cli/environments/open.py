"""From the name of an environment, and tools, to the environment itself.

Enters: --environment and --tool. Leaves: what makes an `Environment` for each episode. A user's file is the user's own code: it is
read here, and run in the processes of the pool alone.
"""

import asyncio
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from rlvr_cli import user_code
from rlvr_cli.config.shared.questions import REASONING_GYM, VERIFIERS
from rlvr_cli.data.packages import verifiers
from rlvr_cli.environments.interface import Environment
from rlvr_cli.environments.tools import TOOL, ChatTools, Tools, load_function, load_tool
from rlvr_cli.errors import RlvrError

ENVIRONMENT = user_code.Role("environment", 0, "class with begin(example, seed) and answer(turn)", kind="class")
# Built-in tools: the name of the environment -> the module with the name of its tag, and the function.
BUILT_IN = {"calculator": ("calculator", "calculate"), "python": ("python", "run_python")}


@dataclass(frozen=True)
class EnvironmentSpec:
    """What plays the episodes.

    Attributes:
        name: a key of `BUILT_IN`, FILE.py:CLASS, verifiers:ID[,KEY=VALUE...], or empty if there are only tools.
        tools: each FILE.py:FUNCTION.
        chat: whether the policy is a chat model, which calls tools in its own way.
    """

    name: str
    tools: tuple[str, ...] = ()
    chat: bool = False

    @property
    def title(self) -> str:
        """How it is called in run.json and messages."""
        return " ".join(filter(None, (self.name, *self.tools)))

    @property
    def calls(self) -> bool:
        """Whether there are tools that a chat model calls."""
        return self.chat and not self.is_file

    @property
    def is_file(self) -> bool:
        """Whether it is a class of the user's; the arguments of a package's environment may end in .py, too."""
        return user_code.is_file_spec(self.name) and not self.name.startswith((VERIFIERS, REASONING_GYM))

    @property
    def of_verifiers(self) -> bool:
        """Whether it is an environment of verifiers, which hears every turn and says itself when an episode ends."""
        return self.name.startswith(VERIFIERS)

    @property
    def facts(self) -> dict[str, Any]:
        """What run.json stores: a resumed run must have the same."""
        if not self.title:
            return {}
        digests = {file: user_code.sha256(file) for file in self.files}
        if self.of_verifiers:
            digests = verifiers.digests(self.name)
        own = {"files": list(digests)} if digests else {}
        return {"environment": {"name": self.title, **own, "sha256": list(digests.values())}}

    @property
    def files(self) -> tuple[str, ...]:
        """The specifications among these that name files."""
        return (self.name, *self.tools) if self.is_file else self.tools


def check_environment(spec: EnvironmentSpec) -> None:
    """Raise RlvrError unless the environment and the tools exist; files are read, but not run."""
    if spec.is_file:
        user_code.find(spec.name, ENVIRONMENT)
        if spec.tools:
            raise RlvrError(
                f"--tool adds to built-in tools, and {spec.name} answers by itself.", "Leave one of them out."
            )
    elif spec.name.startswith(REASONING_GYM):
        raise RlvrError(
            f"{spec.name} is a dataset with a grader: each question is answered in one turn.",
            f"Write --dataset {shlex.quote(spec.name)} in place of --environment.",
        )
    elif spec.of_verifiers:
        verifiers.check_installed()
        if verifiers.parse(spec.name).size is not None or spec.tools:
            what = "--tool" if spec.tools else "size, which is for --dataset,"
            raise RlvrError(f"{what} does not go with the environment {spec.name}.", "Leave it out.")
        if not spec.chat:
            raise RlvrError(f"The environment {spec.name} speaks in messages.", "Add --chat.")
    elif spec.name and spec.name not in BUILT_IN:
        raise RlvrError(
            f"There is no environment {spec.name}.",
            f"Choose one of {', '.join(BUILT_IN)}, path/to/file.py:Class, or verifiers:ID.",
        )
    built_in = _built_in(spec) if spec.tools else {}
    names = Counter([*built_in, *(tool.rpartition(":")[2] for tool in spec.tools)])
    for tool in spec.tools:
        user_code.find(tool, TOOL)
        file, _, name = tool.rpartition(":")
        if name == "policy":
            raise RlvrError(
                f"{file}: a tool cannot be called policy: turns of that name are the policy's own.",
                "Give it another name.",
            )
        if names[name] > 1:
            own = f", one of them by --environment {spec.name}" if name in built_in else ""
            raise RlvrError(f"Several tools are called {name}{own}.", "Give each --tool a name of its own.")


def load_environment(spec: EnvironmentSpec) -> Callable[[], Environment]:
    """Return what makes an environment; files are run.

    Raises:
        RlvrError: see `check_environment` and `user_code.load`.
    """
    check_environment(spec)
    if spec.is_file:
        return user_code.load(spec.name, ENVIRONMENT)
    if spec.of_verifiers:
        loaded = verifiers.load(spec.name)
        from rlvr_cli.environments.verifiers import VerifiersEnvironment, schemas_of  # here: it needs the library

        loop, schemas = asyncio.new_event_loop(), schemas_of(loaded)
        return lambda: VerifiersEnvironment(loaded, loop, schemas)
    if spec.chat:
        functions = load_functions(spec)
        return lambda: ChatTools(functions)
    tools = dict(load_tool(tool) for tool in spec.tools) | _built_in(spec)
    return lambda: Tools(tools)


def load_functions(spec: EnvironmentSpec) -> dict[str, Callable[..., object]]:
    """Return the functions of the tools by their names; files are run. Raises RlvrError as `user_code.load`."""
    return dict(load_function(tool) for tool in spec.tools) | _built_in(spec)


def _built_in(spec: EnvironmentSpec) -> dict[str, Callable[..., object]]:
    if not spec.name:
        return {}
    module, function = BUILT_IN[spec.name]
    found = resolve_name(f"rlvr_cli.environments.{module}")
    return {found.NAME: getattr(found, function)}
