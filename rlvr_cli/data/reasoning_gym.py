"""Questions of reasoning-gym: more than a hundred families of tasks, generated from a seed and scored by the package.

Enters: `reasoning-gym:FAMILY[,KEY=VALUE...]`, where a key is `size`, `seed` or an option of the family. Leaves: examples whose ground
truth holds all that the grader `reasoning_gym` needs.

The same specification gives the same questions. The package makes them in a process of its own, because some families depend on
Python's hash seed, and because it prints, and sets the seed of numpy. No question is given twice. Whether it belongs to
"train" or "validation" is a function of the question alone, so that no training question is evaluated, whatever the seeds.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rlvr_cli.config.parsing.options import nearest
from rlvr_cli.config.shared.questions import REASONING_GYM, named_arguments, split_outside_brackets
from rlvr_cli.data.synthetic import split_of
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.reasoning_gym import entry_of, families, ground_truth_of, open_family, option_defaults
from rlvr_cli.process import die_with_parent
from rlvr_cli.terminal import console
from rlvr_cli.text import storable
from rlvr_cli.types import Example

SIZE = 500  # questions, where neither size nor a limit is given: the package's own number
MAX_SEED = 999
# The package draws question number i from seed + i: so far are our seeds apart there; the last one is below 2**32.
SEED_STRIDE = 4_000_000
CHUNK = 500  # questions of one dataset of the package; what it makes may depend on the size
VALIDATION_ONE_IN = 2  # questions, by hash
GIVE_UP = 1_000  # questions in a row of which none is new
EXAMPLE = f"{REASONING_GYM}gcd,size=2000,seed=7,max_value=500"
MIXTURE = (
    f'{REASONING_GYM}composite,datasets=[{{"name":"gcd","weight":2}},{{"name":"lcm","config":{{"max_value":50}}}}]'
)
PART = ("name", "weight", "config")  # of what is in a mixture


@dataclass(frozen=True)
class GymSpec:
    """A family of reasoning-gym and its options."""

    family: str
    config: dict[str, Any]
    size: int
    seed: int = 0

    @property
    def name(self) -> str:
        """The specification with all that it stands for."""
        options = {**self.config, "size": self.size, "seed": self.seed}
        return f"{REASONING_GYM}{self.family}," + ",".join(
            f"{key}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
            for key, value in options.items()
        )


def parse(spec: str, *, limit: int | None = None, seed: int = 0) -> GymSpec:
    """Read a specification.

    Args:
        limit: the size, if the specification has none.
        seed: the seed, if it has none.

    Raises:
        RlvrError: it is not `reasoning-gym:FAMILY[,KEY=VALUE...]`, or size or seed is out of range.
    """
    family, config = named_arguments(spec, prefix=REASONING_GYM, example=EXAMPLE)
    size, seed = config.pop("size", limit or SIZE), config.pop("seed", seed)
    if type(size) is not int or size < 1:
        raise RlvrError(f"The size in {spec!r} is not a number of questions.", f"For example {EXAMPLE}.")
    if type(seed) is not int or not 0 <= seed <= MAX_SEED:
        raise RlvrError(f"The seed in {spec!r} is not a whole number from 0 to {MAX_SEED}.", f"For example {EXAMPLE}.")
    return GymSpec(family, config, size, seed)


def evaluation_spec(spec: str) -> str:
    """The specification of the questions for evaluations while this one is trained on: as many as are asked for."""
    family, *pairs = split_outside_brackets(spec)
    return ",".join([family, *(pair for pair in pairs if not pair.startswith("size="))])


def questions(spec: GymSpec, *, split: str, limit: int | None) -> tuple[list[Example], list[str]]:
    """Return the examples of a split, at most `limit`, and what the user is to be told about them.

    The first n do not depend on how many are asked for.

    Raises:
        RlvrError: the package is not installed, there is no such family or option, or the package cannot make the questions.
    """
    size = min(spec.size, limit or spec.size)
    examples: list[Example] = []
    seen: set[str] = set()
    since = 0
    with closing(_drawn(spec)) as drawn, console.progress("generating", size) as bar:
        for question, truth in drawn:
            since += 1
            if question not in seen and split_of(question, one_in=VALIDATION_ONE_IN) == split:
                seen.add(question)
                name = f"{spec.family}-{split}-{spec.seed}-{len(examples) + 1}"
                examples.append(Example(id=name, question=question, ground_truth=truth))
                bar.advance(1)
                since = 0
            if len(examples) == size or since == GIVE_UP:
                break
    if not examples:
        raise RlvrError(
            f"There is no question of {spec.name} in the {split} split: its family has too few.",
            "Choose other options.",
        )
    few = len(examples) < size
    return examples, [f"{spec.name} has only {len(examples):,} different questions in its {split} split."] * few


def _drawn(spec: GymSpec) -> Generator[tuple[str, str]]:
    """Questions with their ground truths, one after the other, from a process that is killed when this is closed."""
    environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [sys.executable, "-P", "-m", "rlvr_cli.data.reasoning_gym"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            setup = dataclasses.asdict(spec) | {"parent": os.getpid()}
            process.stdin.write(json.dumps(setup).encode())
            process.stdin.close()
            for line in process.stdout:
                reply = json.loads(line)
                if isinstance(reply, dict):
                    raise RlvrError(reply["problem"], reply["hint"])
                yield reply[0], reply[1]
            process.wait()
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise RlvrError(f"reasoning-gym ended before it had made the questions of {spec.family}: {last}")
        finally:
            process.kill()


# The process that makes the questions


def main() -> None:
    """Write questions without end, one JSON line each: the question and its ground truth; or what is wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the package prints is no reply
    setup = json.load(sys.stdin)
    die_with_parent(setup.pop("parent"))
    try:
        for reply in _made(GymSpec(**setup)):
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
    except RlvrError as error:
        replies.write(json.dumps({"problem": error.problem, "hint": error.hint}) + "\n")


def _made(spec: GymSpec) -> Iterator[tuple[str, str]]:
    config = checked(spec)
    start = spec.seed * SEED_STRIDE
    while True:
        try:
            made = open_family(spec.family, {**config, "size": CHUNK, "seed": start})
            for index in range(CHUNK):
                entry = made[index]
                truth = ground_truth_of(spec.family, config, entry)
                if entry_of(truth)[2] != entry:
                    raise TypeError(f"an entry of {spec.family} is not the same after it was stored")
                yield storable(entry["question"]), truth
        except Exception as error:  # whatever a family of the package raises
            raise RlvrError(
                f"reasoning-gym cannot make the questions of {spec.family} with {spec.config or 'its default options'}: "
                f"{' '.join(str(error).split())[:500] or type(error).__name__}"
            ) from error
        start += CHUNK


def checked(spec: GymSpec) -> dict[str, Any]:
    """The options of a family, with the types that it takes.

    Raises:
        RlvrError: there is no such family or option, or a value of another type.
    """
    known = families()
    if spec.family not in known:
        raise _unknown(f"reasoning-gym has no family {spec.family!r}", spec.family, known, "Its families are")
    defaults = option_defaults(spec.family)
    for key, value in spec.config.items():
        if key not in defaults:
            problem = f"{spec.family} of reasoning-gym has no option {key!r}"
            raise _unknown(problem, key, defaults, "Its options are size, seed,")
        default = list(defaults[key]) if isinstance(defaults[key], tuple) else defaults[key]
        kind = type(default)
        if kind in (bool, int, float, str, list) and type(value) is not kind and (kind, type(value)) != (float, int):
            raise RlvrError(
                f"{key} of {spec.family} is {json.dumps(value)}, and its default {json.dumps(default)}.",
                f"Write {key}={json.dumps(default)}, or another value of this kind.",
            )
    if spec.family == "composite":
        _check_parts(spec.config.get("datasets"))
    return spec.config


def _check_parts(parts: object) -> None:
    """Raise RlvrError unless the `datasets` of a composite are families with options of theirs."""
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise RlvrError(
            f"The datasets of composite are {json.dumps(parts)}, not a list of objects.", f"For example {MIXTURE}."
        )
    for part in parts:
        for key in part:
            if key not in PART:
                raise _unknown(f"A dataset of composite has no key {key!r}", key, PART, "Its keys are")
        name, config, weight = part.get("name"), part.get("config", {}), part.get("weight", 1)
        if not isinstance(name, str) or not isinstance(config, dict) or type(weight) not in (int, float):
            raise RlvrError(
                f"{json.dumps(part)} in the datasets of composite is not a name, a number as weight and an object as config.",
                f"For example {MIXTURE}.",
            )
        if name == "composite":
            raise RlvrError(
                "A composite of reasoning-gym holds another one, whose answers the package does not score.",
                "Write the datasets of the inner one into the outer one.",
            )
        checked(GymSpec(name, {key: value for key, value in config.items() if key not in ("size", "seed")}, SIZE))


def _unknown(problem: str, word: str, known: Iterable[str], all_are: str) -> RlvrError:
    near = nearest(word, known)
    return RlvrError(f"{problem}." + (f" Did you mean {near[0]!r}?" if near else ""), f"{all_are} {', '.join(known)}.")


if __name__ == "__main__":
    main()
