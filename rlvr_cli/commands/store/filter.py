"""`rlvr filter`: make a training dataset from the rollouts of runs, or from another dataset.

Enters: a FilterConfig. Leaves: FILE, with --with-control FILE-control, FILE.meta.json with their provenance, and on stdout a
table of what was kept, what was dropped, and why.
"""

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from rlvr_cli import __version__
from rlvr_cli.analysis.queries.database import Database, open_examples, open_runs
from rlvr_cli.analysis.queries.selection import (
    Item,
    Question,
    Selected,
    Selection,
    Stage,
    ThinkingRules,
    by_question,
    find_contaminated,
    read_examples,
    read_samples,
    response_rows,
    select,
    template_of,
)
from rlvr_cli.config.parsing.options import flag, options
from rlvr_cli.config.store.filter import FilterConfig
from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.data.fusion import fused_forms
from rlvr_cli.data.pairs import pair_row, pair_up
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import RunInfo, is_pattern, is_run, read_run, resolve_runs
from rlvr_cli.runs.storage.files import check_can_write, os_errors_as_user_errors, shown, utc_now, write_together
from rlvr_cli.runs.storage.parquet import records_parquet
from rlvr_cli.terminal import console, tables
from rlvr_cli.text import storable

Rows = list[dict[str, Any]]
RowsOf = Callable[[Sequence[Item]], Iterable[dict[str, Any]]]  # the rows to write of items, in their order


def run(config: FilterConfig) -> None:
    """Make a dataset. Raises RlvrError for user errors, and then writes nothing."""
    out = Path(config.out)
    check_can_write(out.parent, file=out)
    control = out.with_name(f"{out.stem}-control{out.suffix}") if config.with_control else None
    meta = out.with_name(out.name + ".meta.json")
    left_over = files_left_over(meta, out)
    for path in filter(None, (out, control, meta)):
        if path.exists() and not config.overwrite and path not in left_over:
            raise RlvrError(f"{shown(path)} exists already.", "Choose another --out, or replace it with --overwrite.")
    evaluation = [
        e.question for spec in config.decontaminate_against for e in load_dataset(spec, purpose="eval").examples
    ]
    of_runs = any(is_run(source, config.runs_dir) or is_pattern(source) for source in config.source)
    with ExitStack() as opened:
        selected, rows_of, described = (
            from_runs(config, evaluation, opened) if of_runs else from_dataset(config, evaluation)
        )
        columns = ("stage", "kept", "dropped", "why")
        tables.print_table(columns, [(s.name, s.kept, s.dropped, s.why) for s in selected.stages], output=config.format)
        if not selected.kept:
            last = next(s for s in selected.stages if not s.kept)
            raise RlvrError(
                f"Nothing is left: the stage {last.name!r} dropped the last {last.dropped} rows.",
                "Loosen the filter. No file was written.",
            )
        data, written = encoded(out, selected.kept, rows_of)
        files, of_control = [(out, data)], None  # the data come last: where they are, the rest is, too
        if control is not None:
            data, of_control = encoded(control, selected.control, rows_of)
            files.insert(0, (control, data))
    provenance = {
        "rlvr_version": __version__,
        "created_at": utc_now(),
        **written,
        "control": of_control,
        "sources": described,
        "options": {k: v for k, v in asdict(config).items() if k in {f.name for f in options(FilterConfig)}},
        "stages": [asdict(s) for s in selected.stages],
    }
    described_by = storable(json.dumps(provenance, indent=2, ensure_ascii=False)).encode() + b"\n"
    write_together([(meta, described_by), *files])  # no data is ever without its meta
    for path in filter(None, (out, control, meta)):
        console.say(f"wrote    {path}")
    if of_runs and config.emit == "traces":
        console.say(
            "tokens   are not written: rlvr sft on this file tokenizes the text; on the run itself it uses the sampled ids"
        )
    console.say(f"next     {next_command(config, described)}")


def from_runs(config: FilterConfig, evaluation: Sequence[str], opened: ExitStack) -> tuple[Selected, RowsOf, Rows]:
    """Select from runs: the selection, what gives the rows to write while `opened` is, and a description of each run."""
    named = resolve_runs(config.source, config.runs_dir)
    console.report_passed_over(named.others)
    infos = [read_run(path) for path in named.runs]
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
        templates={i.id: template_of(i) for i in infos},
        rules=thinking_rules(config),
    )
    _check_every_run_has_rollouts(infos, items, phase=phase, step=config.step)
    unknown = sum(q.text is None for q in questions.values())
    if unknown and (evaluation or config.emit in ("questions", "fused")):
        raise RlvrError(
            f"{unknown} of {len(questions)} questions cannot be extracted from their prompts: run.json has no template for them.",
            "Use --emit traces without --decontaminate-against: it needs only the prompts.",
        )
    if config.emit == "questions":
        items = by_question(items)
    of = "questions" if config.emit == "questions" else "rollouts"
    what = f"{'' if phase == 'all' else phase + ' '}{of} of {', '.join(i.id for i in infos)}"
    selected = _select(config, items, questions, evaluation, source=what)
    described = [_description(info, phase=phase) for info in infos]

    def traces(items: Sequence[Item]) -> Iterator[dict[str, Any]]:
        """Read the rows of items while they are written: there may be more than memory holds."""
        responses = response_rows(database, {i.key for i in items}, phase=phase, step=config.step)
        for item, row in zip(items, responses, strict=True):
            assert row["key"] == item.key, "responses come in the order in which they were selected"
            yield _trace(row, questions[row["question"]], with_question=not unknown)

    if config.emit == "traces":
        return selected, traces, described
    keys = {i.key for i in [*selected.kept, *selected.control]}
    rows: dict[Any, Any]
    if config.emit == "questions":
        rows = _question_rows([i.key for i in items], questions, keys)
        if config.order == "easy_first":
            selected.kept.sort(key=lambda item: -questions[item.key].pass_rate)
    elif config.emit == "pairs":
        responses = response_rows(database, keys, phase=phase, step=config.step, with_ids=True)
        rows = _pair_rows(config, responses, questions)
        selected = _paired(config, selected, list(rows))
    else:
        rows, selected = _fused(traces(selected.kept), selected)
    return selected, _held(rows), described


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
    dataset = load_dataset(
        source,
        split=config.split,
        question_field=config.question_field,
        answer_field=config.answer_field,
        purpose="train",
    )
    judged = sum(e.response is not None for e in dataset.examples)
    if judged < dataset.rows and (names := thinking_rules(config).names):
        rules = " and ".join(names)
        if not judged:
            raise RlvrError(
                f"{dataset.name} has no responses: the rules of their thinking ({rules}) have nothing to judge.",
                "Leave the rules out, or filter a run, or a file with a field response.",
            )
        console.say(
            f"note: {dataset.rows - judged} of {dataset.rows} rows have no response; the rules of the thinking ({rules}) keep them"
        )
    with open_examples(dataset.examples, timeout_seconds=config.timeout_seconds) as database:
        condition = database.condition(config.where, table="dataset") if config.where else "true"
        items, questions = read_examples(database, dataset.examples, condition=condition, rules=thinking_rules(config))
    selected = _select(config, items, questions, evaluation, source=f"rows of {dataset.name}")
    texts = ("id", "question", "ground_truth", "prompt", "response")
    rows = {e.id: {t: getattr(e, t) for t in texts if getattr(e, t) is not None} for e in dataset.examples}
    described = {"dataset": dataset.name, "split": dataset.split, "rows": dataset.rows}
    return selected, _held(rows), [{**described, "fingerprint": dataset.fingerprint, "grader": dataset.default_grader}]


def _held(rows: Mapping[Any, dict[str, Any]]) -> RowsOf:
    """Rows that are in memory, by the keys of their items."""
    return lambda items: (rows[item.key] for item in items)


def thinking_rules(config: FilterConfig) -> ThinkingRules:
    """What the thinking of a response must be."""
    return ThinkingRules(
        language=config.language or None,
        min_share=config.min_language_share,
        max_paragraph_words=config.max_paragraph_words,
        without_code=config.without_code,
    )


def files_left_over(meta: Path, out: Path) -> list[Path]:
    """What an interrupted `rlvr filter` has left: a .meta.json that describes a file that is not there, and the control."""
    try:
        described = json.loads(meta.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(described, dict) or described.get("file") != out.name or out.exists():
        return []
    control = described.get("control")
    return [meta, *([out.with_name(str(control.get("file")))] if isinstance(control, dict) else [])]


def encoded(path: Path, items: Sequence[Item], rows_of: RowsOf) -> tuple[memoryview, dict[str, Any]]:
    """Return the bytes of a .jsonl or .parquet file with the rows of items; and its name, rows and sha256, for the .meta.json.

    Those of a .jsonl file are in a temporary file without a name, in the same directory.
    """
    if path.suffix == ".parquet":
        data = records_parquet([*rows_of(items)])
    else:
        with os_errors_as_user_errors(path), TemporaryFile(dir=path.parent) as file:
            file.writelines(storable(json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows_of(items))
            file.flush()
            data = memoryview(mmap(file.fileno(), 0, access=ACCESS_READ))
    return data, {"file": path.name, "rows": len(items), "sha256": hashlib.sha256(data).hexdigest()}


def next_command(config: FilterConfig, described: Rows) -> str:
    """The command that trains on the file; with the run's grader, prompt and chat options if they are not the defaults."""
    command = (
        {"pairs": "dpo", "traces": "sft", "fused": "sft"}.get(config.emit, "grpo") if "run" in described[0] else "grpo"
    )
    words = ["rlvr", command, "--dataset", config.out]
    if config.emit == "fused":
        return shlex.join([*words, "--prompt", "question_only", "--chat"])
    graders = {d["grader"] for d in described}
    prompts = {d["prompt"]["name"] for d in described if isinstance(d.get("prompt"), dict)}
    if len(graders) == 1 and isinstance(grader := graders.pop(), str) and grader != "r1_zero":
        words += ["--grader", grader]
    if len(prompts) == 1 and (prompt := prompts.pop()) != "r1_zero":
        words += ["--prompt", prompt]
    chats = [d["chat"] for d in described if d.get("chat")]
    if len(chats) == len(described) and all(chat == chats[0] for chat in chats):
        words += chats[0]
    return shlex.join(words)


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
        limit=config.limit,
        with_control=config.with_control,
        seed=config.seed,
    )
    seen = find_contaminated(questions, evaluation, ngram=config.ngram) if evaluation else None
    return select(items, questions, selection, seen=seen, source=source)


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
        "chat": _chat_options(info),
        "grader": _fact(info, "grader"),
    }


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


def _question_rows(
    order: Sequence[str], questions: Mapping[str, Question], keys: set[Any]
) -> dict[str, dict[str, Any]]:
    """One row per question of `keys`. If different questions have the same id, later ones get a number appended."""
    rows: dict[str, dict[str, Any]] = {}
    taken: set[str] = set()
    for key in order:
        q = questions[key]
        name, number = q.id, 1
        while name in taken:
            number += 1
            name = f"{q.id}-{number}"
        taken.add(name)
        if key in keys:
            truth = {"question": q.text, "ground_truth": q.ground_truth}
            rows[key] = {"id": name, **truth, "pass_rate": q.pass_rate, "n": q.n}
    return rows


def _pair_rows(
    config: FilterConfig, responses: Iterable[Mapping[str, Any]], questions: Mapping[str, Question]
) -> dict[str, dict[str, Any]]:
    """The pairs of each question by their ids."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in responses:
        groups.setdefault(row["question"], []).append({**row, "id": "/".join(map(str, row["key"]))})
    rows = {}
    for question, group in groups.items():
        group.sort(key=lambda row: row["key"])
        for pair in pair_up(group, count=config.pairs_per_question, seed=config.seed):
            known = {"question": questions[question].text} if questions[question].text is not None else {}
            row = {**known, "ground_truth": questions[question].ground_truth, **pair_row(*pair)}
            rows[row["id"]] = row
    return rows


def _paired(config: FilterConfig, selected: Selected, pairs: Sequence[str]) -> Selected:
    """The selection with a stage that makes pairs of its responses."""
    stage = Stage(
        "pairs",
        len(pairs),
        0,
        f"of {len(selected.kept)} responses: right x wrong ones of a question, at most {config.pairs_per_question}",
    )
    if not pairs:
        stage = Stage("pairs", 0, len(selected.kept), "no question has both a right and a wrong response")
    return Selected([Item(pair, "") for pair in pairs], [*selected.stages, stage])


def _fused(traces: Iterable[dict[str, Any]], selected: Selected) -> tuple[dict[str, Any], Selected]:
    """Both forms of each trace by their ids, and the selection with a stage that makes them. Equal forms are one row."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    thinking = 0
    for trace in traces:
        of_question = {name: value for name, value in trace.items() if name != "prompt"}
        forms = list(fused_forms(trace["question"], trace["response"]))
        thinking += bool(forms)
        for name, question, response in forms:
            row = of_question | {"id": f"{trace['id']}/{name}", "question": question, "response": response}
            rows.setdefault((question, response), row)
    why = f"two forms of each of {thinking} responses, equal ones once; the others do not think, or do not answer"
    stage = Stage("fused", len(rows), len(selected.kept) - thinking, why)
    by_id = {row["id"]: row for row in rows.values()}
    return by_id, Selected([Item(name, "") for name in by_id], [*selected.stages, stage])


def _trace(row: Mapping[str, Any], question: Question, *, with_question: bool) -> dict[str, Any]:
    run_id, _, step, _, _ = row["key"]
    return {
        "id": "/".join(map(str, row["key"])),
        **({"question": question.text} if with_question else {}),
        "prompt": row["prompt"],
        "response": row["response"],
        "ground_truth": row["ground_truth"],
        "reward": row["reward"],
        "step": step,
        "run": run_id,
    }


def _chat_options(info: RunInfo) -> list[str]:
    """The options that put the run's prompts into a chat template, as words of a command; empty without --chat."""
    config = info.metadata.get("config")
    if not isinstance(config, dict) or not config.get("chat"):
        return []
    words = ["--chat"]
    for name, default in (("chat_thinking", "auto"), ("chat_system", "")):
        if (value := config.get(name, default)) != default:
            words += [flag(name), str(value)]
    return words


def _fact(info: RunInfo, name: str) -> Any:
    facts = info.metadata.get("facts")
    return facts.get(name) if isinstance(facts, dict) else None
