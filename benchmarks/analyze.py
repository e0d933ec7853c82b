"""Wall time and memory of `rlvr analyze` on a large run, compared with pandas on the same rows as JSON lines.

    python benchmarks/analyze.py [--rows 1000000] [--repeat 5] [--no-pandas] [--keep DIRECTORY]

Enters: nothing; the rows are made up (600 characters of text each, 50,000 per part). Leaves: one line per question,
with the wall seconds of a fresh process (median) and its peak memory for each tool, and their ratio. A million rows
take about 0.4 GB as Parquet and 1 GB as JSON lines. Needs pandas for the comparison: pip install pandas.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from rows import Row, write

PER_PART = 50_000
CATEGORIES = ("format_1_answer_1", "format_1_answer_0", "format_0_answer_0")
QUESTIONS = {
    "categories of the last step": ["categories"],
    "categories of all steps": ["select category, count(*) from rollouts group by 1"],
    "reward by step": ["select step, avg(reward), avg(num_response_tokens) from rollouts group by 1 order by 1"],
    "questions by pass rate": [
        "select example_id, avg(reward) r from rollouts group by 1 having r between 0.2 and 0.8 order by r"
    ],
}
PANDAS = {
    "categories of the last step": "d[d.step == d.step.max()].groupby('category').size()",
    "categories of all steps": "d.groupby('category').size()",
    "reward by step": "d.groupby('step')[['reward', 'num_response_tokens']].mean()",
    "questions by pass rate": "d.groupby('example_id').reward.mean().loc[lambda r: r.between(0.2, 0.8)]",
}


def make_run(
    root: Path,
    rows: int,
    *,
    name: str = "large",
    per_part: int = PER_PART,
    words_each: int = 120,
    one_step: bool = False,
    samples_each: int = 1,
    times: int = 1,
) -> Path:
    """Make a run with that many evaluation rollouts, in the files that rlvr writes.

    Args:
        per_part: rollouts of a part, each of another question.
        words_each: of a response.
        one_step: one evaluation of as many questions as rollouts; else each part is a step.
        samples_each: with `one_step`, more than one: of each question, whose prompts then differ.
        times: how often each part is there: again under other names, hard links. The run has `rows` x `times` rollouts.
    """
    import numpy as np
    import pyarrow as pa

    from rlvr_cli.runs.manifest import entry_of, line_of, part_path
    from rlvr_cli.runs.run_dir import RunDir
    from rlvr_cli.runs.storage.parquet import to_parquet
    from rlvr_cli.runs.storage.schemas import SCHEMA_VERSION, rollout_schema

    RunDir.create(root, "eval", name=name, metadata={"seed": 0, "config": {}, "facts": {}}).close()
    rng = np.random.default_rng(0)
    words = np.array(["so", "the", "sum", "is", "therefore", "we", "add", "and", "carry", "one", "digit", "wait"])
    n = min(per_part, rows)
    texts = [" ".join(words[rng.integers(0, len(words), words_each)]) for _ in range(n)]
    kinds = rng.integers(0, 3, n)
    lengths = rng.integers(20, 60, n)
    ids = [f"question-{i}" for i in range(n)]
    flat = rng.integers(0, 150_000, int(lengths.sum()), dtype=np.int32)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))

    def column(field: pa.Field, step: int) -> pa.Array:
        constant = {
            "run_id": name, "phase": "eval", "step": step, "policy_version": step, "sample_index": 0, "prompt": "What is it?",
            "ground_truth": "7", "finish_reason": "stop", "stop_reason": "</answer>", "num_prompt_tokens": 16, "grader": "r1_zero",
            "extracted_answer": "7", "seed": 1, "sampled_at": datetime(2026, 1, 1),
        }  # fmt: skip
        match field.name:
            case "example_id":
                return pa.array(ids, field.type)
            case "response":
                return pa.array(texts, field.type)
            case "response_ids" | "sampled_logprobs" | "prompt_ids":
                values = pa.array(flat if field.name != "sampled_logprobs" else -flat.astype(np.float32) / 150_000)
                return pa.ListArray.from_arrays(offsets, values, type=field.type)
            case "category":
                return pa.array([CATEGORIES[k] for k in kinds], field.type)
            case "failure_kind":
                return pa.array([None if k == 0 else "wrong_answer" for k in kinds], field.type)
            case "num_response_tokens":
                return pa.array(lengths, field.type)
            case "format_reward":
                return pa.array((kinds < 2).astype(float), field.type)
            case "answer_reward" | "reward":
                return pa.array((kinds == 0).astype(float), field.type)
            case "mean_logprob" | "mean_entropy":
                return pa.array(rng.random(n), field.type)
        value = constant.get(field.name) if field.nullable else constant[field.name]
        return pa.array([value] * n, field.type)

    path = root / name
    columns = {f.name: column(f, 0) for f in rollout_schema()}
    parts = max(rows // n, 1)
    with (path / "manifest.jsonl").open("ab") as manifest:
        for number in range(parts):
            step, part = (0, number) if one_step else (number, 0)
            columns |= {column: pa.array([step] * n, pa.int64()) for column in ("step", "policy_version")}
            if one_step:
                places = range(number * n, number * n + n)
                columns["example_id"] = pa.array([f"question-{i // samples_each}" for i in places], pa.string())
                if samples_each > 1:
                    columns["sample_index"] = pa.array([i % samples_each for i in places], pa.int64())
                    columns["prompt"] = pa.array([f"What is {i // samples_each}?" for i in places], pa.string())
            data = to_parquet(pa.table(list(columns.values()), schema=rollout_schema()))
            relative = part_path("eval", step, part)
            (path / relative).write_bytes(data)
            entry = entry_of(data, path=relative, rows=n, phase="eval", step=step, schema_version=SCHEMA_VERSION)
            manifest.write(line_of(entry))
            for again in range(1, times):
                other = replace(entry, path=part_path("eval", step, part + again * parts))
                (path / other.path).hardlink_to(path / relative)
                manifest.write(line_of(other))
    with RunDir.resume(path):
        pass  # leaving it records what is committed
    return path


def write_jsonl(run: Path, target: Path) -> None:
    """Write the same rows as most tools store them: without the token ids, which are half of the bytes."""
    from rlvr_cli.runs.readers import read_rollouts

    steps = len(list((run / "rollouts").iterdir()))
    keep = ["step", "example_id", "prompt", "response", "category", "reward", "num_response_tokens", "finish_reason"]
    with target.open("w") as file:
        for step in range(steps):
            for row in read_rollouts(run, phase="eval", step=step, columns=keep).to_pylist():
                file.write(json.dumps(row) + "\n")


def measure(command: list[str], repeat: int) -> tuple[float, float]:
    """Return (median wall seconds, peak MB) of a fresh process."""
    seconds, peak = [], 0.0
    for _ in range(repeat):
        wrapper = (
            "import resource, subprocess, sys; r = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); "
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(r.returncode)"
        )
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", wrapper, *command], capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - started)
        peak = max(peak, int(done.stdout) / 1024)
    return statistics.median(seconds), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-pandas", action="store_true")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--keep", type=Path, help="make the run in this directory, or use the one that is there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.keep or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        if not (root / "large").exists():
            make_run(root, arguments.rows)
        run, lines = root / "large", root / "large.jsonl"
        size = sum(f.stat().st_size for f in (run / "rollouts").iterdir()) / 1e6
        print(f"{arguments.rows:,} rows, {size:,.0f} MB of Parquet in {len(list((run / 'rollouts').iterdir()))} parts")
        if not arguments.no_pandas and not lines.exists():
            write_jsonl(run, lines)
            print(f"{lines.stat().st_size / 1e6:,.0f} MB as JSON lines")
        work, rows = f"{arguments.rows:,} rows, {size:,.0f} MB", []
        print(f"{'question':<30} {'rlvr s':>8} {'MB':>6} {'pandas s':>9} {'MB':>7} {'ratio':>7}")
        for name, query in QUESTIONS.items():
            ours = measure(
                [sys.executable, "-m", "rlvr_cli", "analyze", *query, str(run), "--limit", "20"], arguments.repeat
            )
            line, theirs = f"{name:<30} {ours[0]:>8.2f} {ours[1]:>6.0f}", (None, None)
            if not arguments.no_pandas:
                code = f"import pandas as pd; d = pd.read_json({str(lines)!r}, lines=True); print({PANDAS[name]})"
                theirs = measure([sys.executable, "-c", code], 1)
                line += f" {theirs[0]:>9.1f} {theirs[1]:>7.0f} {theirs[0] / ours[0]:>6.0f}x"
            print(line, flush=True)
            for unit, mine, other in zip(("s", "MB"), ours, theirs, strict=True):
                rows.append(Row(name, work, "" if other is None else "pandas", unit, mine, other, ""))
        write(arguments.json, rows)


if __name__ == "__main__":
    main()
