"""The homework's deliverables, beside best/program.py: conversation_log.json and report.md, made from the rows of a run.

Enters: a run. Leaves: both files in it. They say nothing that the rows do not.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rlvr_cli.discovery.attempts import STARTING
from rlvr_cli.discovery.search import PHASE
from rlvr_cli.runs.readers import read_parts
from rlvr_cli.runs.storage.files import atomic_write
from rlvr_cli.text import printable

COLUMNS = (
    *("step", "sample_index", "prompt", "response", "reward", "failure_kind", "grade_error", "seed"),
    *("num_prompt_tokens", "num_response_tokens", "candidate"),
)
SETTINGS = (
    *("task", "dim", "proposer", "strategy", "rounds", "num_samples", "parents", "islands", "max_attempts", "max_tokens", "target"),
    *("seed", "endpoint", "chat", "sampling_temperature", "sampling_top_p", "sampling_max_tokens"),
    *("program_timeout", "program_memory_gb"),
)  # fmt: skip
KNOWN = (
    "Known before this run in 11 dimensions, and no discovery of it: 582 points from a binary code, 592 (Ganzhinov, 2022), 593 (AlphaEvolve, "
    "2025), 604 (EinsteinArena, 2026). At most 868 are possible."
)
SHOWN_PROMPTS = 2
SHOWN_CHARACTERS = 6_000  # of a prompt in the report


def write_homework(run: Path, metadata: Mapping[str, Any]) -> None:
    """Write conversation_log.json and report.md. Raises RlvrError."""
    rows = [row for part in read_parts(run, phase=PHASE, columns=COLUMNS) for row in part.to_pylist()]
    rows.sort(key=lambda row: row["candidate"]["number"])
    log = json.dumps(conversation_log(rows, metadata), ensure_ascii=False, indent=1)
    atomic_write(run / "conversation_log.json", f"{log}\n".encode())
    atomic_write(run / "report.md", report(rows, metadata).encode())


def conversation_log(rows: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """All prompts, responses and verdicts, by round."""
    config = metadata["config"]
    rounds: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        candidate = row["candidate"]
        rounds.setdefault(row["step"], []).append(
            {
                "attempt": candidate["number"],
                "parents": candidate["parents"],
                "messages": [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": row["response"]},
                ],
                "verdict": {
                    "score": row["reward"],
                    "num_points": candidate["num_points"],
                    "category": _category(row),
                    "error": candidate["error"],
                    "same_as": candidate["same_as"],
                },
                "tokens": {"prompt": row["num_prompt_tokens"], "response": row["num_response_tokens"]},
                "seed": row["seed"],
            }
        )
    return {
        "model": metadata["facts"]["model"]["name"],
        "base_url": config.get("base_url") or None,
        "settings": {name: config[name] for name in SETTINGS if name in config},
        "start": metadata.get("start"),
        "rounds": [{"round": number, "attempts": attempts} for number, attempts in sorted(rounds.items())],
    }


def report(rows: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> str:
    """The report: method, process, result."""
    config, facts = metadata["config"], metadata["facts"]
    started = metadata.get("start") or {}
    start, competes = started.get("score"), bool(started.get("points_sha256"))
    valid = [row for row in rows if row["candidate"]["points_sha256"]]
    gains = _gains(valid, at_least=(competes and start) or 0.0)
    final = f"{start:g} ({STARTING})" if competes and not gains else _scored(gains[-1] if gains else None)
    counts = Counter(_category(row) for row in rows)
    lines = [
        f"# {facts['dataset']['name']}: a search with a verifier",
        "",
        "## Method",
        "",
        f"- proposer: {_proposer(config, facts)}",
        f"- strategy: {config['strategy']}; {len(rows)} attempts, up to {config['num_samples']} in a round",
        f"- tokens: {sum(r['num_prompt_tokens'] for r in rows):,} of prompts, {sum(r['num_response_tokens'] for r in rows):,} of responses",
        f"- each program ran alone, for {config['program_timeout']:g} s at most; its points were verified outside of it, exactly",
        "",
        "## Process",
        "",
        f"- score of the program to start from: {'none' if start is None else f'{start:g}'}",
        f"- first valid score: {_scored(valid[0] if valid else None)}",
        f"- final score: {final}",
        "",
        *_table_of(gains),
        "What became of the attempts:",
        "",
        "| result | attempts |",
        "| --- | --: |",
        *(f"| {printable(kind, keep='')} | {count} |" for kind, count in counts.most_common()),
        "",
    ]
    lines += _before_gains(gains, start)
    where = "" if final == _scored(None) else " The program is best/program.py, its points best/points.json."
    lines += ["## Result", "", f"Final score: {final}.{where}"]
    if facts["dataset"].get("dim") == 11:
        lines += ["", KNOWN]
    return "\n".join(map(printable, lines)) + "\n"


def _before_gains(gains: Sequence[Mapping[str, Any]], start: float | None) -> list[str]:
    """The prompts before the largest gains over all earlier scores, of which `start`, that of the program to start from, is the first."""
    scores = [row["reward"] for row in gains]
    before = list(accumulate(scores, max, initial=start or 0.0))
    rises = [i for i, score in enumerate(scores) if score > before[i]]
    largest = sorted(rises, key=lambda i: before[i] - scores[i])[:SHOWN_PROMPTS]
    lines = ["## Prompts before the largest gains", ""] if largest else []
    for i in sorted(largest):
        prompt = gains[i]["prompt"]
        cut = f"\n[{len(prompt) - SHOWN_CHARACTERS:,} characters more]" if len(prompt) > SHOWN_CHARACTERS else ""
        lines += [f"Attempt {gains[i]['candidate']['number']}, from {before[i]:g} to {scores[i]:g}:", ""]
        lines += [*(f"    {line}" for line in (prompt[:SHOWN_CHARACTERS] + cut).splitlines()), ""]
    return lines


def _table_of(gains: Sequence[Mapping[str, Any]]) -> list[str]:
    if not gains:
        return []
    rows = [
        f"| {row['candidate']['number']} | {row['step']} | {row['reward']:g} | {', '.join(map(str, row['candidate']['parents'])) or 'start'} |"
        for row in gains
    ]
    return ["| attempt | round | best score | parents |", "| --: | --: | --: | --- |", *rows, ""]


def _proposer(config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    match config["proposer"]:
        case "mutate":
            return "no language model: one parameter of a program was changed at random (`--proposer mutate`)"
        case "replay":
            return "no language model was asked: the responses were read from a file (`--proposer replay`)"
    return f"{facts['model']['name']}, sampled at temperature {config['sampling_temperature']:g}"


def _gains(valid: Iterable[Mapping[str, Any]], *, at_least: float) -> list[Mapping[str, Any]]:
    """The valid rows with a higher score than all before, and with this score or a higher one. The last is the best."""
    gains: list[Mapping[str, Any]] = []
    for row in valid:
        is_gain = row["reward"] > gains[-1]["reward"] if gains else row["reward"] >= at_least
        if is_gain:
            gains.append(row)
    return gains


def _category(row: Mapping[str, Any]) -> str:
    if row["grade_error"]:
        return f"the verifier failed: {row['grade_error']}"
    return row["failure_kind"] or "valid"


def _scored(row: Mapping[str, Any] | None) -> str:
    return "nothing valid" if row is None else f"{row['reward']:g} (attempt {row['candidate']['number']})"
