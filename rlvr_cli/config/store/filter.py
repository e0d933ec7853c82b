"""The options of `rlvr filter`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlvr_cli.config.grpo import Language
from rlvr_cli.config.parsing.options import LONGEST, Format, Provenance, check_effects, check_values, flag, knob
from rlvr_cli.errors import RlvrError


@dataclass(frozen=True)
class FilterConfig(Provenance):
    """Make a dataset from a run's rollouts or another dataset: keep rows by correctness, difficulty and overlap with test sets.

    Examples:
        rlvr filter my-ei --correct-only --dedup --out traces.jsonl
        rlvr filter zero-shot --emit questions --min-pass-rate 0.2 --max-pass-rate 0.8 --out medium.jsonl
        rlvr filter samples --emit pairs --pairs-per-question 4 --out pairs.jsonl
    """

    source: tuple[str, ...] = knob(
        (), "Run directories or names, or one dataset (file or name).", group="Data", argument=True, completes="source"
    )  # fmt: skip
    phase: Literal["", "train", "eval", "all"] = knob(
        "", "Phase of the rollouts. Default: train if the run has any, else eval.", group="Data", common=True
    )
    step: int | None = knob(None, "Step of the rollouts. Default: all steps.", group="Data", common=True, at_least=0)
    split: str = knob("", "Split of a named dataset. Empty: the training split.", group="Data")
    question_field: str = knob(
        "", "Field of the dataset that holds the question. Empty: detected by name.", group="Data"
    )
    answer_field: str = knob("", "Field of the dataset that holds the answer. Empty: detected by name.", group="Data")
    skip_bad_lines: bool = knob(
        False, "Skip and count unreadable lines of the datasets instead of stopping.", group="Data"
    )
    runs_dir: str = knob("runs", "Directory that holds the runs, or s3://BUCKET/PREFIX.", group="Data", path=True)
    where: str = knob(
        "", "SQL condition on the columns of rollouts, or on a dataset's id, question and ground_truth.", group="Filter", common=True
    )  # fmt: skip
    timeout_seconds: float = knob(
        600.0,
        "Seconds that reading the rollouts may take, including the evaluation of --where and writing what is read.",
        group="Filter",
        above=0,
        at_most=LONGEST,
    )
    correct_only: bool = knob(False, "Keep only rewarded responses.", group="Filter", common=True)
    language: Literal["", Language] = knob(
        "",
        "Keep responses whose thinking is in this language, by the scripts of its words outside formulas: no mixed languages.",
        group="Filter",
    )
    min_language_share: float = knob(
        1.0, "With --language: the least share of the words in it.", group="Filter", at_least=0, at_most=1
    )
    max_paragraph_words: int | None = knob(
        None, "Keep responses whose thinking has no paragraph of more words. Default: any.", group="Filter", at_least=1
    )
    without_code: bool = knob(False, "Keep responses whose thinking has no block of code (```).", group="Filter")
    min_pass_rate: float = knob(
        0.0,
        "Keep questions with at least this share of correct samples.",
        group="Filter",
        common=True,
        at_least=0,
    )
    max_pass_rate: float = knob(
        1.0, "Keep questions with at most this share of correct samples.", group="Filter", common=True
    )
    max_per_question: int | None = knob(
        None,
        "Responses to keep per question, chosen at random. Default: all.",
        group="Filter",
        common=True,
        at_least=1,
    )
    shortest: bool = knob(
        False,
        "With --max-per-question and --limit, keep the shortest responses instead of random ones.",
        group="Filter",
    )
    dedup: bool = knob(
        False, "Drop duplicate questions, or duplicate responses to a question; case and white space are ignored.", group="Filter", common=True
    )  # fmt: skip
    decontaminate_against: tuple[str, ...] = knob(
        (),
        "Drop questions of this dataset: equal ones but for case, spaces and punctuation, and ones that share --ngram consecutive words; repeatable.",
        group="Filter",
        common=True,
        completes="dataset",
    )
    ngram: int = knob(
        13,
        "Number of consecutive words in common that make two questions count as the same.",
        group="Filter",
        at_least=1,
    )
    limit: int | None = knob(
        None,
        "Rows to keep, chosen at random; with --emit fused traces, each of which gives two rows. Default: all.",
        group="Filter",
        common=True,
        at_least=1,
    )
    seed: int = knob(0, "Seed of the random choices.", group="Filter", at_least=0)
    out: str = knob(
        "",
        "File to write: .jsonl or .parquet; FILE.meta.json records how it was made.",
        group="Output",
        common=True,
        path=True,
    )
    emit: Literal["traces", "questions", "pairs", "fused"] = knob(
        "traces",
        "Rows: traces (prompt and response, for rlvr sft), questions (for rlvr grpo, ei and eval), pairs of a right and a wrong response "
        "to one question (for rlvr dpo), or fused: each trace once with and once without its thinking (Qwen3, for rlvr sft --chat).",
        group="Output",
        common=True,
    )
    order: Literal["source", "easy_first"] = knob(
        "source",
        "With --emit questions of a run: easy_first sorts them by their pass rate, for rlvr grpo --question-order file.",
        group="Output",
    )
    pairs_per_question: int = knob(
        4, "With --emit pairs: pairs per question, at most, of as many different responses as there are.", group="Output", at_least=1
    )  # fmt: skip
    with_control: bool = knob(
        False, "Also write FILE-control: as many rows, chosen at random from the same source.", group="Output"
    )
    overwrite: bool = knob(False, "Replace existing files.", group="Output")
    format: Format = knob("table", "How the summary table is printed.", group="Output")

    def __post_init__(self) -> None:
        check_values(self)
        if not self.min_pass_rate <= self.max_pass_rate <= 1:
            raise RlvrError(
                f"--min-pass-rate {self.min_pass_rate:g} and --max-pass-rate {self.max_pass_rate:g} are not a valid range.",
                "Both must be between 0 and 1, and the minimum at most the maximum.",
            )
        if not self.source:
            raise RlvrError("rlvr filter needs a run or a dataset.", "Name one: rlvr filter RUN --out FILE.jsonl")
        if Path(self.out).suffix not in (".jsonl", ".parquet"):
            raise RlvrError(
                f"--out {self.out!r} has an unknown file type." if self.out else "--out is missing.",
                "Give a file name that ends in .jsonl or .parquet.",
            )  # fmt: skip
        of_responses = ("max_per_question", "shortest", "language", "max_paragraph_words", "without_code")
        given = next((name for name in of_responses if getattr(self, name)), None)
        if self.emit == "questions" and given:
            raise RlvrError(f"{flag(given)} selects responses, but --emit questions writes none.", "Leave it out.")
        if self.min_language_share < 1 and not self.language:
            raise RlvrError("--min-language-share needs --language.", "Add --language en, or leave it out.")
        needs = {
            "ngram": (bool(self.decontaminate_against), "--decontaminate-against"),
            "pairs_per_question": (self.emit == "pairs", "--emit pairs"),
        }
        check_effects(self, needs)
        if self.emit == "pairs":
            without = ("correct_only", "max_per_question", "limit", "shortest", "with_control")
            given = next((name for name in without if getattr(self, name)), None)
            if given:
                raise RlvrError(
                    f"{flag(given)} and --emit pairs exclude each other: a pair needs a right and a wrong response.",
                    "Leave it out; --pairs-per-question and --where limit the pairs.",
                )
        if self.order != "source" and self.emit != "questions":
            raise RlvrError(f"--order {self.order} and --emit {self.emit} exclude each other.", "Use --emit questions.")
        if self.emit == "fused" and self.with_control:
            raise RlvrError("--with-control and --emit fused exclude each other.", "Leave one of them out.")
        if self.shortest and not (self.max_per_question or self.limit):
            raise RlvrError(
                "--shortest has no effect without a limit on the number of responses.",
                "Add --max-per-question 1, or --limit N.",
            )
