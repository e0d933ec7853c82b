"""Questions of environments of the library `verifiers`, and the environments themselves.

Enters: `verifiers:ID[,KEY=VALUE...][,size=N]`, where a key is `size` or an argument of the environment's `load_environment`. Leaves: examples
whose ground truth is the whole row in JSON, as the environment wants it back; its rubric is the grader.

An environment is the code of somebody else: it is loaded in a process of its own, here and where it plays.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from inspect import isawaitable
from pathlib import Path
from typing import Any, NamedTuple

from rlvr_cli.config.shared.questions import VERIFIERS, named_arguments
from rlvr_cli.data.synthetic import SPLITS
from rlvr_cli.errors import RlvrError, missing_extra
from rlvr_cli.process import die_with_parent
from rlvr_cli.text import storable
from rlvr_cli.types import Example

PLAYED = "0.3"  # the version of the library
EXAMPLE = f"{VERIFIERS}my-game,difficulty=2,size=200"


class VerifiersSpec(NamedTuple):
    """An environment, the arguments of its `load_environment`, and how many questions are asked for (None: all)."""

    name: str
    arguments: dict[str, Any]
    size: int | None


@dataclass
class Caught:
    """The exceptions of a rollout that the library catches.

    Attributes:
        rewards: of reward functions, for which it takes a reward of 0.
        tools: of tools, as the policy is told of them.
    """

    rewards: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)


CAUGHT: ContextVar[Caught | None] = ContextVar("CAUGHT", default=None)  # of the rollout that runs


def parse(spec: str) -> VerifiersSpec:
    """Read a specification. Raises RlvrError unless it is `verifiers:ID[,KEY=VALUE...][,size=N]`."""
    name, arguments = named_arguments(spec, prefix=VERIFIERS, example=EXAMPLE)
    size = arguments.pop("size", None)
    if not name:
        raise RlvrError(f"{spec!r} names no environment.", f"For example {EXAMPLE}.")
    if size is not None and (type(size) is not int or size < 1):
        raise RlvrError(f"The size in {spec!r} is not a number of questions.", f"For example {EXAMPLE}.")
    return VerifiersSpec(name, arguments, size)


def check_installed() -> None:
    """Raise RlvrError unless the library is there, in a version whose environments answer their policy in this process."""
    if find_spec("verifiers") is None:
        raise missing_extra("verifiers", "verifiers")
    found = version("verifiers")
    if not found.startswith(f"{PLAYED}."):
        raise RlvrError(
            f"verifiers {found} is installed, and episodes are played with the environments of verifiers {PLAYED}: in 0.4 "
            "there are none of these (docs/environments.md).",
            "Install it from the clone of rlvr: pip install -e '.[verifiers]'",
        )


def digests(spec: str) -> dict[str, str]:
    """The SHA-256 (hex) of the file of an environment's module, or of each Python file in its folder, by its name. Nothing is run.
    Empty where Python finds no such module.
    """
    found = find_spec(_module_of(parse(spec).name).partition(".")[0])
    if found is None:
        return {}
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    files = {f.relative_to(folder.parent): f for folder in folders for f in sorted(folder.rglob("*.py"))}
    if not folders:
        files = {Path(str(found.origin)).name: Path(str(found.origin))}
    return {str(name): hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items() if file.is_file()}


def load(spec: str) -> Any:
    """Load the environment of a specification: its code runs. The exceptions that its rollouts catch are put into `CAUGHT`, too.

    Raises:
        RlvrError: the library is not installed, it cannot load the environment, or no episodes can be played with that.
    """
    check_installed()
    name, arguments, _ = parse(spec)
    try:
        environment = import_module("verifiers").load_environment(name, **arguments)
    except Exception as error:  # whatever the environment raises
        raise RlvrError(
            f"verifiers cannot load {name}: {' '.join(str(error).split())[:500] or type(error).__name__}",
            f"Install it: it is a module {_module_of(name)} with a function load_environment, whose arguments are the keys.",
        ) from error
    if environment.requires_group_rollouts:
        raise RlvrError(
            f"{name} of verifiers has rewards of a whole group, and an episode is rewarded by itself.",
            "Use an environment whose rewards are of single rollouts.",
        )
    members = members_of(environment)
    if any((one.tool_defs or []) != (members[0].tool_defs or []) for one in members):
        raise RlvrError(
            f"{name} of verifiers is a group of environments with different tools, and a policy is told of the same ones in each episode.",
            "Play its environments in runs of their own, or give all of them the same tools.",
        )
    for one in members:
        if getattr(one, "max_total_completion_tokens", 0) > 0:
            raise RlvrError(
                f"{name} of verifiers ends a rollout by max_total_completion_tokens, and is told no numbers of tokens.",
                "Leave it out of the environment: --sampling-max-tokens bounds what the policy samples in an episode.",
            )
        if not one.score_rollouts:
            raise RlvrError(
                f"{name} of verifiers has score_rollouts=False: each reward would be 0.",
                "Leave it out of the environment.",
            )
        one.timeout_seconds = None  # it would count the time in which the policy samples
        if hasattr(one, "error_formatter"):
            one.error_formatter = _telling(one.error_formatter)
    for rubric in {id(rubric): rubric for one in members for rubric in _rubrics_of(one.rubric)}.values():
        rubric.funcs = [_failing(function) for function in rubric.funcs]
    return environment


def _module_of(name: str) -> str:
    return name.rpartition("/")[2].replace("-", "_")


def members_of(environment: Any) -> list[Any]:
    """The environments in a group, which may hold groups in turn; of any other environment itself."""
    if not isinstance(environment, import_module("verifiers").EnvGroup):
        return [environment]
    return [one for member in environment.envs for one in members_of(member)]


def _rubrics_of(rubric: Any) -> list[Any]:
    """A rubric and, of a group, those in it."""
    return [rubric, *(one for member in getattr(rubric, "rubrics", ()) for one in _rubrics_of(member))]


def _failing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function whose exceptions, and what is no number, are put into `CAUGHT`."""

    @wraps(function)
    async def called(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            value = await value if isawaitable(value) else value
            float(value)
        except Exception as error:  # whatever the function raises
            if caught := CAUGHT.get():
                name = getattr(function, "__name__", type(function).__name__)
                caught.rewards.append(f"the reward function {name} raised {type(error).__name__}: {error}")
            raise
        return value

    return called


def _telling(formatter: Callable[[Exception], str]) -> Callable[[Exception], str]:
    """An `error_formatter` whose texts are put into `CAUGHT`."""

    @wraps(formatter)
    def called(error: Exception) -> str:
        text = formatter(error)
        if caught := CAUGHT.get():
            caught.tools.append(text)
        return text

    return called


def questions(spec: str, *, split: str, limit: int | None) -> tuple[list[Example], list[str]]:
    """Return the examples of a split, at most `limit`, and what the user is to be told about them.

    Raises:
        RlvrError: as `load`, or the environment has no such questions.
    """
    check_installed()
    wanted = parse(spec)
    most = min(filter(None, (wanted.size, limit)), default=None)
    setup = {"spec": spec, "split": split, "most": most, "parent": os.getpid()}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rlvr_cli.data.packages.verifiers"],
        input=json.dumps(setup).encode(),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise RlvrError(f"verifiers ended before it had given the questions of {wanted.name}: {last}")
    said = json.loads(done.stdout)
    if "problem" in said:
        raise RlvrError(said["problem"], said["hint"])
    stem = wanted.name.rpartition("/")[2]
    examples = [
        Example(id=f"{stem}-{split}-{number}", question=storable(question), ground_truth=truth)
        for number, (question, truth) in enumerate(said["rows"], 1)
    ]
    return examples, said["notes"]


def text_of(content: Any) -> str:
    """The text of a message's content. Raises TypeError if it holds something else, such as an image."""
    if content is None or isinstance(content, str):
        return content or ""
    if any(part["type"] != "text" for part in content):
        raise TypeError("a message holds something else than text")
    return "".join(part["text"] for part in content)


# The process that reads the questions


def main() -> None:
    """Write one line of JSON: the rows, each (question, ground truth), and notes; or what is wrong."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the environment prints is no reply
    setup = json.load(sys.stdin)
    die_with_parent(setup.pop("parent"))
    try:
        said = _read(**setup)
    except RlvrError as error:
        said = {"problem": error.problem, "hint": error.hint}
    json.dump(said, replies)
    replies.flush()


def _read(spec: str, split: str, most: int | None) -> dict[str, Any]:
    environment, name = load(spec), parse(spec).name
    notes: list[str] = []
    try:
        if split == SPLITS[0]:
            table = environment.get_dataset()
        else:
            if environment.build_eval_dataset() is None:
                notes = [f"{name} has no questions for evaluations: these are the ones it trains on."]
            table = environment.get_eval_dataset()
        rows = [_row(table[number]) for number in range(min(len(table), most or len(table)))]
    except Exception as error:  # whatever the environment raises
        raise RlvrError(
            f"{name} of verifiers gives no questions of the {split} split: {' '.join(str(error).split())[:500] or type(error).__name__}"
        ) from error
    if not rows:
        raise RlvrError(f"{name} of verifiers has no questions in the {split} split.")
    return {"rows": rows, "notes": notes}


def _row(row: dict[str, Any]) -> tuple[str, str]:
    prompt = row["prompt"]
    last = prompt if isinstance(prompt, str) else text_of(prompt[-1]["content"])
    return last, json.dumps(row)


if __name__ == "__main__":
    main()
