"""What a training command reads before it starts: questions, held-out questions, prompt, grader, and the facts of them all.

Enters: a config. Leaves: `Inputs`, or an RlvrError before anything heavy was loaded.
"""

from dataclasses import dataclass
from typing import Any

from rlvr_cli import display
from rlvr_cli.datasets import Dataset, dataset_names, load_dataset
from rlvr_cli.engines import choose_engine, model_facts
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.prompts import PromptTemplate, load_prompt
from rlvr_cli.rollouts import choose_grader


@dataclass(frozen=True)
class Inputs:
    """The inputs of a command that samples its own training data."""

    template: PromptTemplate
    dataset: Dataset
    questions: Dataset | None  # of the evaluations
    pool: GraderPool  # not started yet
    engine: str
    engine_reason: str
    facts: dict[str, Any]  # for run.json


def load_inputs(config: Any, *, questions_per_batch: int) -> Inputs:
    """The inputs of `rlvr ei` and `rlvr grpo`.

    Raises:
        RlvrError: unreadable or too few questions, an unknown prompt, grader or engine.
    """
    template = load_prompt(config.prompt)
    dataset = load_dataset(
        config.dataset,
        split=config.split,
        question_field=config.question_field,
        answer_field=config.answer_field,
        skip_bad_lines=config.skip_bad_lines,
        purpose="train",
    )
    display.skipped_lines(dataset.num_skipped, dataset.skipped)
    for note in dataset.notes:
        display.say(note)
    if dataset.rows < questions_per_batch:
        raise RlvrError(
            f"A batch needs {questions_per_batch} different questions; {dataset.name} has {dataset.rows}.",
            "Ask for fewer responses per batch, or more per question, or give a larger --dataset.",
        )
    questions = evaluation_questions(config)
    pool = grader_pool(config, dataset.default_grader)
    if questions is not None and grader_pool(config, questions.default_grader).spec != pool.spec:
        raise RlvrError(
            f"{dataset.name} is graded by {pool.spec}, and {questions.name} by {questions.default_grader}.",
            "Name the grader of both: --grader; or evaluate on questions of the same kind.",
        )
    engine = choose_engine(config.engine, base_url="")
    facts = {
        "dataset": facts_of(dataset),
        "eval_dataset": questions and facts_of(questions),
        "model": model_facts(engine.name, config.model, fetch=not config.dry_run),
        "prompt": {"name": template.name, "text": template.text},
        "grader": pool.spec,
        "engine": engine.name,
    }
    return Inputs(template, dataset, questions, pool, engine.name, engine.reason, facts)


def evaluation_questions(config: Any) -> Dataset | None:
    """The questions named with --eval-dataset, else the evaluation split of a dataset that has a name, else None."""
    name = config.dataset.split(":")[0]
    spec = config.eval_dataset or (name if name in dataset_names() else "")
    if not spec:
        return None
    limit = max(config.eval_examples, config.final_eval_examples or 0)
    named = spec.split(":")[0] in dataset_names()  # their fields are known
    questions = load_dataset(
        spec,
        limit=limit,
        question_field=None if named else config.question_field,
        answer_field=None if named else config.answer_field,
        skip_bad_lines=config.skip_bad_lines,
    )
    display.skipped_lines(questions.num_skipped, questions.skipped)
    return questions


def grader_pool(config: Any, dataset_grader: str | None) -> GraderPool:
    """The grader that was named, or the one that fits the dataset, in its processes."""
    return GraderPool(
        choose_grader(config.grader, dataset_grader=dataset_grader, prompt=config.prompt),
        format_rule=config.format_rule,
        workers=config.grader_workers,
        timeout=config.grader_timeout,
    )


def facts_of(dataset: Dataset) -> dict[str, Any]:
    """What identifies a dataset in run.json."""
    return {"name": dataset.name, "rows": dataset.rows, "fingerprint": dataset.fingerprint}
