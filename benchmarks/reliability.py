"""Run the full form of tests/reliability and make the table of what it measured.

    python benchmarks/reliability.py                      # all of it: about two hours on two cores
    python benchmarks/reliability.py --only signals sql   # tests/reliability/test_signals.py and test_sql.py; other rows are kept
    python benchmarks/reliability.py --page               # run nothing, put reliability.json into docs/reliability.md

Enters: the tests marked `slow` or `full` in tests/reliability. Leaves: their output, `reliability.json` with a row for each
test that passed, and with --page the table in docs/reliability.md. Exit status 1 if a test failed; its old row is removed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from run import machine

HERE = Path(__file__).parent
ROOT = HERE.parent
TESTS = ROOT / "tests/reliability"
RESULTS, PAGE = HERE / "reliability.json", ROOT / "docs/reliability.md"
BEGIN, END = "<!-- figures: made by benchmarks/reliability.py --page -->\n", "<!-- /figures -->\n"


def table(results: dict) -> str:
    """Return the rows of `reliability.json` as a Markdown table."""
    lines = ["| promise | measured | test | minutes |", "|---|---|---|--:|"]
    for subject, rows in sorted(results["rows"].items()):
        for row in rows:
            figures = ", ".join(f"{name} {_shown(value)}" for name, value in row["figures"].items())
            where = f"`{subject}.py::{row['test']}`"
            lines.append(f"| {row['promise']} | {figures} | {where} | {row['seconds'] / 60:.1f} |")
    return "\n".join([f"Machine: {results['machine']}.", "", *lines, ""])


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def with_table(page: str, text: str) -> str:
    """Return the page with its table replaced by this one."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert rest, f"{PAGE} has no markers for the table: {BEGIN}{END}"
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py"))
    parser.add_argument("--only", nargs="+", choices=names, metavar="SUBJECT", help=", ".join(names))
    parser.add_argument("--jobs", default="2", help="tests that run at the same time")
    parser.add_argument("--page", action="store_true", help="run nothing, write the table into docs/reliability.md")
    options = parser.parse_args()
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": {}}
    failed = False
    if not options.page:
        stored["machine"] = machine()
        for name in options.only or names:
            subject = f"test_{name}"
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "pytest", "-m", "slow or full", "-n", options.jobs]
                done = subprocess.run(
                    [*command, str(TESTS / f"{subject}.py")],
                    cwd=ROOT,
                    env=os.environ | {"RLVR_FIGURES": folder},
                )
                failed |= done.returncode not in (0, 5)  # 5: no test is marked
                rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))]
            stored["rows"].pop(subject, None)
            if rows:
                stored["rows"][subject] = rows
            RESULTS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"\n{table(stored)}")
    if options.page:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(stored)), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
