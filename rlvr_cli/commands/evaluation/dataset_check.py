"""`rlvr eval --check-dataset`: which ground truths the grader cannot read.

Enters: a dataset and its grader. Leaves: a table of those that no answer can match, and an error if there are any.
"""

from dataclasses import asdict

from rlvr_cli.data.datasets import Dataset
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders import has_unknown_answer, reference_response
from rlvr_cli.terminal import console, tables
from rlvr_cli.types import Graders


def check_dataset(dataset: Dataset, grader: str, pool: Graders, *, output: str) -> None:
    """Grade every ground truth as the answer to its own question, and list those that are not graded as correct.

    Those that can be read, but for which no answer can be made up, are counted alone.

    Raises:
        RlvrError: some are not, after listing them.
    """
    responses = [reference_response(grader, e.ground_truth) for e in dataset.examples]
    readable = [(e, r) for e, r in zip(dataset.examples, responses, strict=True) if r is not None]
    pairs = [(r, e.ground_truth) for e, r in readable]
    grades = pool.grade(pairs, example_of=lambda i: asdict(readable[i][0]))
    unanswered = [e for e, r in zip(dataset.examples, responses, strict=True) if r is None]
    unread = [
        (e.id, e.ground_truth, "no answer can be built from it")
        for e in unanswered
        if not has_unknown_answer(grader, e.ground_truth)
    ]
    untried = len(unanswered) - len(unread)
    unread += [
        (e.id, e.ground_truth, g.error or g.failure_kind or "not rewarded")
        for (e, _), g in zip(readable, grades, strict=True)
        if g.reward is None or g.reward <= 0.5
    ]
    if untried:
        what = "no program that passes them" if grader == "python" else "no right answer"
        console.say(
            f"note: of {untried} ground truths {what} can be made up: they were read, and are not checked further."
        )
    if unread:
        tables.print_table(("example_id", "ground_truth", "why"), unread, output=output)
        raise RlvrError(
            f"{grader} cannot read {len(unread)} of the {len(dataset.examples)} ground truths of {dataset.name}.",
            "Every answer to these questions would be graded wrong: correct or remove them, or choose another --grader.",
        )
    console.say(f"{grader} reads all {len(dataset.examples)} ground truths of {dataset.name}.")
