"""Pairs of responses of two runs, each judged in both orders, as rows of a run of their own.

Enters: two runs, and a judge with a rubric of pairs. Leaves: a `Rollout` for each pair and order: its prompt is what the judge was
asked, its response what it said, its reward that of run A: 1 if A's response was the better one, 0.5 for a tie.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlvr_cli.data.prompts import stored_prompts
from rlvr_cli.errors import RlvrError
from rlvr_cli.judges.rubric import Rubric
from rlvr_cli.rollouts.grading import grade_fields, utc_now_naive
from rlvr_cli.rollouts.regrade import graded_text
from rlvr_cli.runs.readers import RunInfo, read_parts
from rlvr_cli.types import ORDERS, Grade, Phase, Rollout

COLUMNS = ("step", "example_id", "sample_index", "prompt", "response", "ground_truth", "episode")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A pair of responses to one question, in one order."""

    example_id: str
    sample_index: int  # of the rows of the comparison: that of the responses times `ORDERS`, plus the order
    ground_truth: str
    text: str  # that the judge is asked

    @property
    def swapped(self) -> bool:
        """Whether B's response is shown first."""
        return self.sample_index % ORDERS == 1


class Pairing(NamedTuple):
    """The comparisons of two runs, and a note on the responses that have no counterpart; empty if there are none."""

    comparisons: list[Comparison]
    note: str


def comparisons_of(
    runs: tuple[RunInfo, RunInfo], rubric: Rubric, *, phase: Phase, step: int | None, limit: int | None
) -> Pairing:
    """Pair the responses to the same questions, by question and sample, in both orders.

    Args:
        limit: compare the first questions of the dataset, by their numbers.

    Raises:
        RlvrError: there is no common question, or the same id stands for different questions.
    """
    first, second = (_responses(run, phase=phase, step=step) for run in runs)
    common = sorted(first.keys() & second.keys(), key=_place)
    examples = list(dict.fromkeys(example for example, _ in common))
    kept = set(examples if limit is None else examples[:limit])
    if not common:
        raise RlvrError(
            f"{runs[0].id} and {runs[1].id} have not answered a question in common.",
            "Evaluate both on the same --dataset.",
        )
    found: list[Comparison] = []
    for example, sample in (key for key in common if key[0] in kept):
        a, b = first[example, sample], second[example, sample]
        truth = a["ground_truth"] or None
        known = {"question": _question(a, b, example=example, runs=runs), "ground_truth": truth, "reference": truth}
        for order, (shown, other) in enumerate(((a, b), (b, a))):
            text = rubric.fill({**known, "response_a": shown["response"], "response_b": other["response"]})
            found.append(Comparison(example, sample * ORDERS + order, a["ground_truth"], text))
    note = "have no counterpart, of the same question and sample, and are left out"
    alone = [
        f"{len(own.keys() - other.keys()):,} of {len(own):,} responses of {run.id}"
        for own, other, run in ((first, second, runs[0]), (second, first, runs[1]))
        if own.keys() - other.keys()
    ]
    return Pairing(found, f"note: {' and '.join(alone)} {note}" if alone else "")


def _place(key: tuple[str, int]) -> tuple[str, str, int]:
    """Sorts by question and sample: test-2 before test-10, as the dataset has them. Rows stand in the order in which they were finished."""
    example, sample = key
    return re.sub(r"\d+", lambda number: number[0].zfill(20), example), example, sample


def _responses(run: RunInfo, *, phase: Phase, step: int | None) -> dict[tuple[str, int], Mapping[str, Any]]:
    """Return (example_id, sample_index) -> prompt, how it was made, question, response and ground truth, of one step.

    A question that is not known is None after --shots, else the prompt.
    """
    prompts = stored_prompts(run.metadata)
    rows = [row for part in read_parts(run.path, phase=phase, step=step, columns=COLUMNS) for row in part.to_pylist()]
    last = max((row["step"] for row in rows), default=0) if step is None else step
    return {
        (row["example_id"], row["sample_index"]): {
            "prompt": row["prompt"],
            "prompts": prompts,
            "question": prompts.question_in(row["prompt"], ground_truth=row["ground_truth"])
            or (None if prompts.shots else row["prompt"]),
            "response": graded_text(row),
            "ground_truth": row["ground_truth"],
        }
        for row in rows
        if row["step"] == last
    }


def _question(a: Mapping[str, Any], b: Mapping[str, Any], *, example: str, runs: tuple[RunInfo, RunInfo]) -> str:
    """The question that two rows answer; the prompt, if both have the same and it does not tell the question.

    Raises:
        RlvrError: they answer different ones, or it is not known that they answer the same.
    """
    first, second = (run.id for run in runs)
    known = {row["question"] for row in (a, b)} - {None}
    if len(known) > 1 or a["ground_truth"] != b["ground_truth"]:
        raise RlvrError(
            f"{example} is one question in {first} and another one in {second}.", "Evaluate both on the same --dataset."
        )
    question = min(known, default=a["prompt"])
    unknown = [row for row in (a, b) if row["question"] is None]
    told = all(row["prompts"].asks(row["prompt"], question, ground_truth=row["ground_truth"]) for row in unknown)
    if not told and a["prompt"] != b["prompt"]:
        raise RlvrError(
            f"Whether {example} is the same question in {first} and {second} cannot be told from their prompts, whose shots differ.",
            "Compare runs that have the same --shots, or of which one has none.",
        )
    return question


def missing(comparisons: Sequence[Comparison], committed: set[tuple[Any, ...]]) -> list[Comparison]:
    """Those whose (phase, step, example_id, sample_index) is not committed yet."""
    return [c for c in comparisons if ("eval", 0, c.example_id, c.sample_index) not in committed]


def row_of(comparison: Comparison, grade: Grade, *, run_id: str, grader: str, seed: int) -> Rollout:
    """The row of a comparison."""
    reward = grade.reward if grade.reward is None or not comparison.swapped else 1 - grade.reward
    winner = None if reward is None else "tie" if reward == 0.5 else "A" if reward > 0.5 else "B"
    kind = grade.failure_kind if reward is None else None
    said = grade.judgement
    own = {"reward": reward, "extracted_answer": winner, "failure_kind": kind}
    return Rollout(
        run_id=run_id,
        phase="eval",
        step=0,
        policy_version=0,
        example_id=comparison.example_id,
        sample_index=comparison.sample_index,
        prompt=comparison.text,
        response=said.reply if said else "",
        ground_truth=comparison.ground_truth,
        prompt_ids=(),
        response_ids=(),
        sampled_logprobs=(),
        finish_reason="length" if grade.error == "cut_off" else "stop",
        stop_reason=None,
        num_prompt_tokens=said.prompt_tokens if said else 0,
        num_response_tokens=said.reply_tokens if said else 0,
        grader=grader,
        advantage=None,
        mean_logprob=None,
        mean_entropy=None,
        seed=seed,
        sampled_at=utc_now_naive(),
        **(grade_fields(grade, finish_reason="stop") | own),
    )
