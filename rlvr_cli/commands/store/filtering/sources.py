"""Where `rlvr filter` selects from: runs, or a dataset.

Enters: a FilterConfig. Leaves: what was selected, what gives the rows to write, and a description of the source.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rlvr_cli.analysis.queries.database import Database, open_examples, open_runs
from rlvr_cli.analysis.queries.selection import (
    Item,
    Question,
    Selected,
    Selection,
    ThinkingRules,
    by_question,
    find_contaminated,
    has_several_voices,
    normalized,
    read_examples,
    read_samples,
    response_rows,
    select,
)
from rlvr_cli.commands.store.filtering.contamination import bare_questions
from rlvr_cli.commands.store.filtering.rows import (
    OF_PAIRS,
    OF_TURNS,
    Rows,
    RowsOf,
    dataset_rows,
    fused_rows,
    held,
    pair_rows,
    paired,
    question_rows,
    trace_row,
)
from rlvr_cli.config import config_of
from rlvr_cli.config.parsing.command_line import typed_options, words_of
from rlvr_cli.config.parsing.options import flag, options
from rlvr_cli.config.store.filter import FilterConfig
from rlvr_cli.data.datasets import Dataset, load_dataset
from rlvr_cli.data.prompts import stored_prompts
from rlvr_cli.data.traces import told_as_run_too
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import RunInfo, fact_of, resolve_runs
from rlvr_cli.runs.several import read_runs
from rlvr_cli.runs.storage.files import typed
from rlvr_cli.terminal import console


def from_runs(config: FilterConfig, evaluation: Sequence[str], opened: ExitStack) -> tuple[Selected, RowsOf, Rows]:
    """Select from runs: the selection, what gives the rows to write while `opened` is, and a description of each run."""
    named = resolve_runs(config.source, config.runs_dir)
    _check_options_of_runs(config)
    console.report_passed_over(named.others)
    infos = read_runs(named.runs)
    for notice in (notice for info in infos for notice in info.notices):
        console.say(notice)
    database = opened.enter_context(open_runs(infos, timeout_seconds=config.timeout_seconds))
    condition = database.condition(config.where, table="rollouts") if config.where else "true"
    phase = config.phase or _default_phase(database)
    items, questions = read_samples(
        database,
        phase=phase,
        step=config.step,
        condition=condition,
        prompts={i.id: stored_prompts(i.metadata) for i in infos},
        rules=thinking_rules(config),
        in_turns=config.emit == "traces",
    )
    _check_every_run_has_rollouts(infos, items, phase=phase, step=config.step)
    unknown = sum(q.text is None for q in questions.values())
    if evaluation or config.emit in ("questions", "fused"):
        _check_questions_are_known(questions, infos)
    if config.emit == "questions":
        items = by_question(items, questions)
    of = "questions" if config.emit == "questions" else "rollouts"
    what = f"{'' if phase == 'all' else phase + ' '}{of} of {', '.join(i.id for i in infos)}"
    selected = _select(config, items, questions, evaluation, source=what)
    described = [_description(info, phase=phase) for info in infos]

    def traces(items: Sequence[Item]) -> Iterator[dict[str, Any]]:
        """Read the rows of items while they are written: there may be more than memory holds."""
        also = OF_TURNS if has_several_voices(database, phase=phase, step=config.step) else ()
        responses = response_rows(database, {i.key for i in items}, phase=phase, step=config.step, also=also)
        for item, row in zip(items, responses, strict=True):
            assert row["key"] == item.key, "responses come in the order in which they were selected"
            yield trace_row(row, questions[row["question"]], with_question=not unknown)

    if config.emit == "traces":
        return selected, traces, described
    if config.emit == "fused":
        rows_of, fused = fused_rows(lambda: traces(selected.kept), selected)
        return fused, rows_of, described
    keys = {i.key for i in [*selected.kept, *selected.control]}
    if config.emit == "pairs":
        responses = response_rows(database, keys, phase=phase, step=config.step, also=OF_PAIRS)
        pairs, rows_of = pair_rows(config, selected.kept, responses, questions)
        return paired(config, selected, pairs), rows_of, described
    rows = question_rows([i.key for i in items], questions, keys)
    if config.order == "easy_first":
        selected.kept.sort(key=lambda item: -questions[item.key].pass_rate)
    return selected, held(rows), described


def from_dataset(config: FilterConfig, evaluation: Sequence[str]) -> tuple[Selected, RowsOf, Rows]:
    """Select from a dataset: the selection, what gives the rows to write, and a description of the dataset."""
    source, *others = config.source
    if others:
        raise RlvrError(
            f"{source} and {others[0]} are not runs, and several datasets cannot be filtered together.",
            "Give runs, or one dataset.",
        )
    if config.emit in ("pairs", "fused"):
        raise RlvrError(
            f"--emit {config.emit} needs sampled responses, and {source} is not a run.",
            "Sample responses first (rlvr eval --num-samples 8), and filter that run.",
        )
    needs_samples = (
        "correct_only",
        "min_pass_rate",
        "max_pass_rate",
        "max_per_question",
        "shortest",
        "order",
        "phase",
        "step",
    )
    for name in needs_samples:
        if config.sources.get(name, "default") != "default":
            raise RlvrError(
                f"--{name.replace('_', '-')} needs sampled responses, and {source} is not a run.",
                "Sample responses first (rlvr eval --num-samples 8), and filter that run.",
            )
    with told_as_run_too(source, config.runs_dir):
        dataset = load_dataset(
            source,
            split=config.split,
            question_field=config.question_field,
            answer_field=config.answer_field,
            skip_bad_lines=config.skip_bad_lines,
            purpose="train",
            keeps_traces=True,
        )
    console.report_skipped_lines(dataset.num_skipped, dataset.skipped)
    _check_responses(dataset, rules=thinking_rules(config).names)
    with open_examples(dataset.examples, timeout_seconds=config.timeout_seconds) as database:
        condition = database.condition(config.where, table="dataset") if config.where else "true"
        items, questions = read_examples(database, dataset.examples, condition=condition, rules=thinking_rules(config))
    if evaluation:
        texts = bare_questions(dataset, if_bare="say so with --question-field prompt")
        bare = zip(dataset.examples, texts, strict=True)
        questions = {e.id: replace(questions[e.id], identity=normalized(text)) for e, text in bare}
    selected = _select(config, items, questions, evaluation, source=f"rows of {dataset.name}")
    described = {"dataset": dataset.name, "split": dataset.split, "rows": dataset.rows}
    return (
        selected,
        held(dataset_rows(dataset, out=config.out)),
        [{**described, "fingerprint": dataset.fingerprint, "grader": dataset.default_grader}],
    )


def _check_responses(dataset: Dataset, *, rules: Collection[str]) -> None:
    """Raise RlvrError if there are rules of the thinking and no response to judge, and say how many rows have none."""
    judged = sum(e.response is not None for e in dataset.examples)
    if judged < dataset.rows and rules:
        names = " and ".join(rules)
        if not judged:
            raise RlvrError(
                f"{dataset.name} has no responses: the rules of their thinking ({names}) have nothing to judge.",
                "Leave the rules out, or filter a run, or a file with a field response.",
            )
        console.say(
            f"note: {dataset.rows - judged} of {dataset.rows} rows have no response; the rules of the thinking ({names}) keep them"
        )


def _check_questions_are_known(questions: Mapping[str, Question], infos: Sequence[RunInfo]) -> None:
    """Raise RlvrError if a question is not known, and say how many have their shots."""
    for info in infos:
        if own := sum(q.environment_of == info.id for q in questions.values()):
            environment, dataset = (fact_of(info.metadata, name, "name") for name in ("environment", "dataset"))
            raise RlvrError(
                f"The environment {environment} of {info.id} gave {own} of the prompts, which do not tell the questions.",
                f"The questions are in its dataset {dataset}; rlvr analyze hardest {typed(info.path)}, for training with --phase train, "
                "has the pass rate of each. "
                "--emit traces without --decontaminate-against needs only the prompts.",
            )
    unknown = sum(q.text is None for q in questions.values())
    if unknown:
        raise RlvrError(
            f"{unknown} of {len(questions)} questions cannot be extracted from their prompts: run.json does not tell which part is the question.",
            "Use --emit traces without --decontaminate-against: it needs only the prompts.",
        )
    if with_shots := sum(q.has_shots for q in questions.values()):
        console.say(
            f"note: {with_shots} of {len(questions)} questions cannot be told from the shots before them and are taken with these: an "
            "earlier version asked them"
        )


def _check_options_of_runs(config: FilterConfig) -> None:
    of_datasets = ("split", "question_field", "answer_field")
    for name in of_datasets if config.decontaminate_against else (*of_datasets, "skip_bad_lines"):
        if name in typed_options(config):
            raise RlvrError(
                f"{flag(name)} is an option of datasets, and {config.source[0]} is a run: its questions are those that it asked.",
                "Leave it out; --phase, --step and --where choose among the rollouts.",
            )


def _select(
    config: FilterConfig,
    items: Sequence[Item],
    questions: Mapping[str, Question],
    evaluation: Sequence[str],
    *,
    source: str,
) -> Selected:
    selection = Selection(
        where=bool(config.where),
        thinking=thinking_rules(config),
        correct_only=config.correct_only,
        min_pass_rate=config.min_pass_rate,
        max_pass_rate=config.max_pass_rate,
        max_per_question=config.max_per_question,
        shortest=config.shortest,
        dedup=config.dedup,
        for_pairs=config.emit == "pairs",
        limit=config.limit,
        with_control=config.with_control,
        seed=config.seed,
    )
    seen = find_contaminated(questions, evaluation, ngram=config.ngram) if evaluation else None
    return select(items, questions, selection, seen=seen, source=source)


def thinking_rules(config: FilterConfig) -> ThinkingRules:
    """What the thinking of a response must be."""
    return ThinkingRules(
        language=config.language or None,
        min_share=config.min_language_share,
        max_paragraph_words=config.max_paragraph_words,
        without_code=config.without_code,
    )


def _default_phase(database: Database) -> str:
    phases = {phase for (phase,) in database.rows("SELECT DISTINCT phase FROM rollouts")}
    return "train" if "train" in phases else "eval"


def _check_every_run_has_rollouts(
    infos: Sequence[RunInfo], items: Sequence[Item], *, phase: str, step: int | None
) -> None:
    """Raise RlvrError if a run has no rollouts that could be kept: otherwise this would go unnoticed."""
    giving = {item.key[0] for item in items}
    for info in infos:
        if info.id not in giving:
            asked = ("" if phase == "all" else f"{phase} ") + "rollouts" + ("" if step is None else f" of step {step}")
            raise RlvrError(f"{info.id} has no {asked}.", "See what it has: rlvr analyze, or take --phase all.")


def _description(info: RunInfo, *, phase: str) -> dict[str, Any]:
    """What the .meta.json says of a run."""
    return {
        "run": info.id,
        "path": str(info.path.resolve()),
        "command": info.metadata["command"],
        "status": info.metadata["status"],
        "rollouts_fingerprint": info.fingerprint,
        "phase": phase,
        "model": _fact(info, "model"),
        "dataset": _fact(info, "dataset"),
        "prompt": _fact(info, "prompt"),
        "chat": _given(info, ("chat", "chat_thinking", "chat_system")),
        "episodes": _given(info, ("environment", "tool", "max_turns", "max_episode_tokens", "turn_timeout")),
        "format_rule": _given(info, ("format_rule",)),
        "grader": _fact(info, "grader"),
    }


def _given(info: RunInfo, names: Sequence[str]) -> list[str]:
    """Those of these options of a run that are not the defaults, as words of a command."""
    config, kind = info.metadata.get("config"), config_of(info.metadata["command"])
    if not isinstance(config, dict):
        return []
    defaults = {option.name: json.dumps(option.default) for option in options(kind) if option.name in names}
    return words_of(kind, {n: config[n] for n in names if n in config and json.dumps(config[n]) != defaults.get(n)})


def _fact(info: RunInfo, name: str) -> Any:
    facts = info.metadata.get("facts")
    return facts.get(name) if isinstance(facts, dict) else None
