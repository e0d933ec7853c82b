"""The options of `rlvr filter`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlvr_cli.config.options import Format, Provenance, at_least, check_values, knob
from rlvr_cli.errors import RlvrError


@dataclass(frozen=True)
class FilterConfig(Provenance):
    """Make a dataset of what a run sampled, or of another dataset: only what is right, of the right difficulty, not seen in a test.

    Examples:
        rlvr filter my-ei --correct-only --dedup --out traces.jsonl
        rlvr filter zero-shot --emit questions --min-pass-rate 0.2 --max-pass-rate 0.8 --out medium.jsonl
    """

    source: tuple[str, ...] = knob(
        (), "Run directories or names, or one dataset (a file or a name).", group="Data", argument=True, completes="source"
    )  # fmt: skip
    phase: Literal["", "train", "eval", "all"] = knob(
        "", "Rollouts of which phase. Default: train where there are some, else eval.", group="Data", common=True
    )
    step: int | None = knob(None, "Rollouts of one step. Default: of all.", group="Data", common=True)
    split: str = knob("", "Split of a named dataset. Empty: the one to train on.", group="Data")
    question_field: str = knob("", "Dataset's field with the question. Empty: found by name.", group="Data")
    answer_field: str = knob("", "Dataset's field with the answer. Empty: found by name.", group="Data")
    runs_dir: str = knob("runs", "Directory that holds the runs.", group="Data")
    where: str = knob(
        "", "SQL condition on the columns of rollouts, or on id, question and ground_truth of a dataset.", group="Filter", common=True
    )  # fmt: skip
    correct_only: bool = knob(False, "Keep only rewarded responses.", group="Filter", common=True)
    min_pass_rate: float = knob(
        0.0, "Keep questions with at least this share of right samples.", group="Filter", common=True
    )
    max_pass_rate: float = knob(
        1.0, "Keep questions with at most this share of right samples.", group="Filter", common=True
    )
    max_per_question: int | None = knob(
        None, "Responses kept of each question, chosen at random. Default: all.", group="Filter", common=True
    )
    shortest: bool = knob(
        False, "Let --max-per-question and --limit choose the shortest responses, not random ones.", group="Filter"
    )
    dedup: bool = knob(
        False, "Drop what is there twice: a question, or a response to it, that differs in case and white space at most.", group="Filter", common=True
    )  # fmt: skip
    decontaminate_against: tuple[str, ...] = knob(
        (),
        "Dataset whose questions must not occur: equal to one of them, or with --ngram words in common; repeatable.",
        group="Filter",
        common=True,
        completes="dataset",
    )
    ngram: int = knob(13, "Words in a row that count as the same question.", group="Filter")
    limit: int | None = knob(None, "Rows to keep, chosen at random. Default: all.", group="Filter", common=True)
    seed: int = knob(0, "Seed of the random choices.", group="Filter")
    out: str = knob(
        "", "File to write: .jsonl or .parquet; FILE.meta.json says how it came about.", group="Output", common=True
    )
    emit: Literal["traces", "questions"] = knob(
        "traces",
        "Rows: traces (prompt and response, for rlvr sft) or questions (for rlvr grpo, ei and eval).",
        group="Output",
        common=True,
    )
    with_control: bool = knob(
        False, "Write FILE-control too: as many rows, chosen at random from the same source.", group="Output"
    )
    overwrite: bool = knob(False, "Replace the files when they are there.", group="Output")
    format: Format = knob("table", "How the table of what was kept is printed.", group="Output")

    def __post_init__(self) -> None:
        check_values(self)
        at_least(self, 0, "step", "seed", "min_pass_rate")
        at_least(self, 1, "max_per_question", "ngram", "limit")
        if not self.min_pass_rate <= self.max_pass_rate <= 1:
            raise RlvrError(
                f"--min-pass-rate {self.min_pass_rate:g} and --max-pass-rate {self.max_pass_rate:g} leave nothing.",
                "They are shares between 0 and 1, the smaller one first.",
            )
        if not self.source:
            raise RlvrError("What is to be filtered?", "Name a run or a dataset: rlvr filter RUN --out FILE.jsonl")
        if Path(self.out).suffix not in (".jsonl", ".parquet"):
            raise RlvrError(
                f"--out is {self.out!r}: what kind of file is to be written?" if self.out else "Where to? --out is missing.",
                "Its name must end in .jsonl or .parquet.",
            )  # fmt: skip
        if self.emit == "questions" and (self.max_per_question or self.shortest):
            raise RlvrError(
                "--max-per-question and --shortest choose among responses; --emit questions has none.",
                "Leave them out.",
            )
        if self.shortest and not (self.max_per_question or self.limit):
            raise RlvrError(
                "--shortest says which responses stay when some have to go, and nothing makes them go.",
                "Add --max-per-question 1, or --limit N.",
            )
