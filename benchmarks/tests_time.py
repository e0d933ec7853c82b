"""CPU seconds of the tests by file, with the processes that they start: the same on a busy machine.

    python benchmarks/tests_time.py                           # the default suite
    python benchmarks/tests_time.py -n 0 tests/commands       # arguments of pytest

Prints what pytest prints and two tables, the files and the slowest tests. It is a plugin of pytest that it loads itself.
"""

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

TICK = os.sysconf("SC_CLK_TCK")
tests: Counter[str] = Counter()
counted = 0.0


def used() -> float:
    """CPU seconds of this process and of all that it has started, but for those that were left to others."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        children.setdefault(int(fields[1]), []).append(int(file.parent.name))
        seconds[int(file.parent.name)] = sum(map(int, fields[11:15])) / TICK  # its own and of children that ended
    total, family = 0.0, [os.getpid()]
    while family:
        member = family.pop()
        total += seconds.get(member, 0.0)
        family += children.get(member, [])
    return total


def pytest_collection_finish() -> None:
    global counted
    counted = used()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    global counted
    report = yield
    if call.when == "teardown":
        before, counted = counted, used()
        report.user_properties.append(("cpu_seconds", counted - before))
    return report


def pytest_runtest_logreport(report) -> None:
    tests[report.nodeid] += dict(report.user_properties).get("cpu_seconds", 0.0)


def pytest_terminal_summary(terminalreporter) -> None:
    files: Counter[str] = Counter()
    for test, seconds in tests.items():
        files[test.partition("::")[0]] += seconds
    terminalreporter.section(f"{sum(files.values()):.0f} CPU seconds in {len(tests)} tests")
    for title, rows, number in (("file", files, 60), ("test", tests, 60)):
        terminalreporter.write_line(f"\n| {title} | CPU seconds |\n|---|--:|")
        for name, seconds in rows.most_common(number):
            terminalreporter.write_line(f"| {name} | {seconds:.1f} |")


if __name__ == "__main__":
    sys.exit(pytest.main(["-p", Path(__file__).stem, "-q", *sys.argv[1:]]))
