"""`rlvr filter`: make a training dataset from the rollouts of runs, or from another dataset.

Enters: a FilterConfig. Leaves: FILE, with --with-control FILE-control, FILE.meta.json with their provenance, and on stdout a
table of what was kept, what was dropped, and why.
"""

import hashlib
import json
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from rlvr_cli import __version__
from rlvr_cli.analysis.queries.selection import Item
from rlvr_cli.commands.store.filtering.contamination import bare_questions
from rlvr_cli.commands.store.filtering.rows import Rows, RowsOf
from rlvr_cli.commands.store.filtering.sources import from_dataset, from_runs
from rlvr_cli.config.parsing.options import options
from rlvr_cli.config.shared.prompt import is_judge
from rlvr_cli.config.store.filter import FilterConfig
from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.data.pairs import OF_EPISODES
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import is_pattern, is_run
from rlvr_cli.runs.storage.files import check_can_write, os_errors_as_user_errors, shown, utc_now, write_together
from rlvr_cli.runs.storage.parquet import write_records
from rlvr_cli.terminal import console, tables
from rlvr_cli.text import storable
from rlvr_cli.types import ENVIRONMENT, WITH_FORMAT_RULE

_OF_EPISODES = {"pairs": OF_EPISODES, "fused": "Episodes of several turns are not fused; --emit traces keeps them."}


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
    evaluation: list[str] = []
    for spec in config.decontaminate_against:
        held_out = load_dataset(spec, skip_bad_lines=config.skip_bad_lines, purpose="eval")
        console.report_skipped_lines(held_out.num_skipped, held_out.skipped)
        evaluation += bare_questions(held_out)
    of_runs = any(is_run(source, config.runs_dir) or is_pattern(source) for source in config.source)
    with ExitStack() as opened:
        selected, rows_of, described = (
            from_runs(config, evaluation, opened) if of_runs else from_dataset(config, evaluation)
        )
        columns = ("stage", "kept", "dropped", "why")
        tables.print_table(columns, [(s.name, s.kept, s.dropped, s.why) for s in selected.stages], output=config.format)
        if not selected.kept:
            last = next(s for s in selected.stages if not s.kept)
            of_episodes = last.name == "whole" and any(d.get("episodes") for d in described)
            hint = _OF_EPISODES.get(config.emit) if of_episodes else None
            raise RlvrError(
                f"Nothing is left: the stage {last.name!r} dropped the last {last.dropped} rows.",
                f"{hint or 'Loosen the filter.'} No file was written.",
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
            "tokens   are written of episodes of several turns alone: rlvr sft on this file tokenizes other texts; on the run itself it "
            "uses the sampled ids"
        )
    if command := next_command(config, described):
        console.say(f"next     {command}")


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

    They are in a temporary file without a name, in the same directory.
    """
    with os_errors_as_user_errors(path), TemporaryFile(dir=path.parent) as file:
        if path.suffix == ".parquet":
            write_records(rows_of(items), file, folder=path.parent)
        else:
            file.writelines(storable(json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows_of(items))
        file.flush()
        data = memoryview(mmap(file.fileno(), 0, access=ACCESS_READ))
    return data, {"file": path.name, "rows": len(items), "sha256": hashlib.sha256(data).hexdigest()}


def next_command(config: FilterConfig, described: Rows) -> str:
    """The command that trains on the file; with the run's grader, prompt, chat and environment if they are not the defaults.

    Without a judge, whose options are many. Empty for the questions of a search, which have no answers.
    """
    if any(d.get("command") == "discover" for d in described):
        if config.emit == "questions":
            return ""
        # its verifier grades no responses, and its prompts are in the rows
        described = [d | {"grader": None, "prompt": None} for d in described]
    command = (
        {"pairs": "dpo", "traces": "sft", "fused": "sft"}.get(config.emit, "grpo") if "run" in described[0] else "grpo"
    )
    words = ["rlvr", command, "--dataset", config.out]
    if config.emit == "fused":
        return shlex.join([*words, "--prompt", "question_only", "--chat"])
    graders = {d["grader"] for d in described}
    prompts = {d["prompt"]["name"] for d in described if isinstance(d.get("prompt"), dict)}
    grader = graders.pop() if len(graders) == 1 else None
    if isinstance(grader, str) and grader not in ("r1_zero", ENVIRONMENT) and not is_judge(grader):
        words += ["--grader", grader]
    if len(prompts) == 1 and (prompt := prompts.pop()) != "r1_zero":
        words += ["--prompt", prompt]
    ruled = "--grader" not in words or grader in WITH_FORMAT_RULE
    for name in (*(["format_rule"] if ruled else []), "chat", *(["episodes"] if command == "grpo" else [])):
        given = [d[name] for d in described if d.get(name)]
        if len(given) == len(described) and all(options == given[0] for options in given):
            words += given[0]
    if config.order != "source":
        words += ["--question-order", "file"]
    return shlex.join(words)
