"""The questions: which dataset, and which of its fields."""

from dataclasses import dataclass

from rlvr_cli.config.parsing.options import knob


@dataclass(frozen=True)
class QuestionOptions:
    dataset: str = knob(
        "arithmetic",
        "arithmetic, countdown (or NAME:SIZE[:SEED] to generate), gsm8k, math, a .jsonl/.json/.csv/.parquet file, or hf:ORG/NAME.",
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
