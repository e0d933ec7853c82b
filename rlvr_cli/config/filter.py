"""The options of `rlvr filter`."""

from dataclasses import dataclass
from pathlib import Path

from rlvr_cli.config.options import FORMATS, Provenance, at_least, check_values, knob
from rlvr_cli.errors import RlvrError


@dataclass(frozen=True)
class FilterConfig(Provenance):
    """Make a dataset of what a run sampled, or of another dataset: only what is right, of the right difficulty, not seen in a test."""

    source: tuple[str, ...] = knob(
        (), "Run directories or names, or one dataset (a file or a name).", group="Data", argument=True
    )
    phase: str = knob(
        "", "Rollouts of which phase: train, eval or all. Empty: train where there are some, else eval.", group="Data"
    )
    step: int | None = knob(None, "Rollouts of one step. Default: of all.", group="Data")
    split: str = knob("", "Split of a named dataset. Empty: the one to train on.", group="Data")
    question_field: str = knob("", "Dataset's field with the question. Empty: found by name.", group="Data")
    answer_field: str = knob("", "Dataset's field with the answer. Empty: found by name.", group="Data")
    runs_dir: str = knob("runs", "Directory that holds the runs.", group="Data")
    where: str = knob(
        "", "SQL condition on the columns of rollouts, or on id, question and ground_truth of a dataset.", group="Filter"
    )  # fmt: skip
    correct_only: bool = knob(False, "Keep only rewarded responses.", group="Filter")
    min_pass_rate: float = knob(0.0, "Keep questions with at least this share of right samples.", group="Filter")
    max_pass_rate: float = knob(1.0, "Keep questions with at most this share of right samples.", group="Filter")
    max_per_question: int | None = knob(
        None, "Responses kept of each question, chosen at random. Default: all.", group="Filter"
    )
    shortest: bool = knob(
        False, "Let --max-per-question and --limit choose the shortest responses, not random ones.", group="Filter"
    )
    dedup: bool = knob(
        False, "Drop what is there twice: a question, or a response to it, that differs in case and white space at most.", group="Filter"
    )  # fmt: skip
    decontaminate_against: tuple[str, ...] = knob(
        (), "Dataset whose questions must not occur: equal to one of them, or with --ngram words in common; repeatable.", group="Filter"
    )  # fmt: skip
    ngram: int = knob(13, "Words in a row that count as the same question.", group="Filter")
    limit: int | None = knob(None, "Rows to keep, chosen at random. Default: all.", group="Filter")
    seed: int = knob(0, "Seed of the random choices.", group="Filter")
    out: str = knob("", "File to write: .jsonl or .parquet; FILE.meta.json says how it came about.", group="Output")
    emit: str = knob(
        "traces",
        "Rows: traces (prompt and response, for rlvr sft) or questions (for rlvr grpo, ei and eval).",
        group="Output",
        choices=("traces", "questions"),
    )
    with_control: bool = knob(
        False, "Write FILE-control too: as many rows, chosen at random from the same source.", group="Output"
    )
    overwrite: bool = knob(False, "Replace the files when they are there.", group="Output")
    format: str = knob("table", "How the table of what was kept is printed.", group="Output", choices=FORMATS)

    def __post_init__(self) -> None:
        check_values(self)
        at_least(self, 0, "step", "seed", "min_pass_rate")
        at_least(self, 1, "max_per_question", "ngram", "limit")
        if self.phase not in ("", "all", "train", "eval"):
            raise RlvrError(f"--phase is {self.phase!r}.", "Choose one of train, eval, all.")
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
