"""The questions: which dataset, and which of its fields."""

import json
from dataclasses import dataclass
from typing import Any

from rlvr_cli.config.parsing.options import knob
from rlvr_cli.errors import RlvrError

REASONING_GYM = "reasoning-gym:"  # begins the names of its datasets: reasoning-gym:FAMILY[,KEY=VALUE...]
VERIFIERS = "verifiers:"  # begins the names of its datasets and environments: verifiers:ID[,KEY=VALUE...]
_BRACKETS = {"[": 1, "{": 1, "]": -1, "}": -1}


@dataclass(frozen=True)
class QuestionOptions:
    dataset: str = knob(
        "arithmetic",
        "arithmetic, countdown, multiplication (or NAME:SIZE[:SEED] to generate), gsm8k, math, a .jsonl/.json/.csv/.parquet file, "
        "mmlu:FOLDER, hf:ORG/NAME, reasoning-gym:FAMILY[,KEY=VALUE...], or verifiers:ID[,KEY=VALUE...].",
        group="Data",
        common=True,
        completes="dataset",
    )
    split: str = knob(
        "",
        "Split of a named dataset. Empty: the training split for training, the evaluation split for rlvr eval.",
        group="Data",
    )
    question_field: str = knob("", "Field that holds the question. Empty: detected by name.", group="Data")
    answer_field: str = knob("", "Field that holds the answer. Empty: detected by name.", group="Data")
    skip_bad_lines: bool = knob(False, "Skip and count unreadable lines instead of stopping.", group="Data")


def split_outside_brackets(text: str) -> list[str]:
    """The pieces of a text between commas that are in no bracket."""
    pieces, depth = [""], 0
    for character in text:
        depth += _BRACKETS.get(character, 0)
        if character == "," and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces


def named_arguments(spec: str, *, prefix: str, example: str) -> tuple[str, dict[str, Any]]:
    """Read `PREFIXNAME[,KEY=VALUE...]`: the name, and the values by key; a value is JSON, or else a bare word.

    Raises RlvrError, with the example, for what is not KEY=VALUE or is given twice.
    """
    name, *pairs = split_outside_brackets(spec.removeprefix(prefix))
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier() or key in values:
            what = "is given twice" if key in values else "is not KEY=VALUE"
            raise RlvrError(f"{pair!r} in {spec!r} {what}.", f"For example {example}.")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    return name, values


def split_datasets(text: str) -> tuple[str, ...]:
    """The datasets of a list with commas; the KEY=VALUE pairs after a family of reasoning-gym or an environment of verifiers belong to it."""
    datasets: list[str] = []
    has_keys = REASONING_GYM in text or VERIFIERS in text
    for piece in split_outside_brackets(text) if has_keys else text.split(","):
        of_family = bool(datasets) and datasets[-1].startswith((REASONING_GYM, VERIFIERS))
        if of_family and piece.partition("=")[0].isidentifier() and "=" in piece:
            datasets[-1] += f",{piece}"
        else:
            datasets.append(piece)
    return tuple(datasets)
