"""Compare graders on labeled answers: accuracy, false positives, false negatives and speed.

    python benchmarks/grading.py [cases.jsonl] [--reference FILE.py:FUNCTION] [--repeats 5] [--limit N] [--hostile] [--json FILE] [--errors N]

Enters: JSON lines with `response`, `ground_truth` (a string, a number, or a list of alternatives), `expected` (1 for a
correct response) and, optionally, `kind` (`r1_zero`, the default, or `question_only`) and `category`; by default the
cases of the tests. Cases of category `hostile` are left out without --hostile, since Math-Verify spends seconds on some
of them. Leaves: a line per grader.

The competitors get the answer that our extraction finds, so that only the comparison of answer and ground truth is
measured: exact string equality after stripping, and Math-Verify, `verify(parse(truth), parse(answer))` with `$...$`
around both and with its own time limits, as its README shows. The handout's reference, sail-sg's `r1_zero_reward_fn`
(fast=True), is on no package index: --reference names the function in a copy of its file; it gets the unchanged
responses. Calls per second are those of one process; the graders take turns within a repeat, in an order that is
reversed every second repeat, and the result is the median over the repeats. Every turn runs in its own process: a
grader that caches verdicts would only look them up the second time.
"""

import argparse
import importlib.util
import json
import logging
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rows import Row, write

from rlvr_cli.graders.answers.extraction import last_boxed, tagged_answer, unboxed
from rlvr_cli.graders.question_only import question_only_reward_fn
from rlvr_cli.graders.r1_zero import is_formatted, r1_zero_reward_fn, truths_of

Case = dict[str, Any]
Judge = Callable[[Case], bool]

TESTS = Path(__file__).parents[1] / "tests" / "fixtures"
GOALS = {"Math-Verify": ">= 20", "reference": ">= 1"}


def read_cases(path: Path) -> list[Case]:
    """Read the cases of a file; some fields have other names in the tests' files."""
    cases = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        {
            **case,
            "response": case.get("response", f" </think> <answer> {case.get('answer')} </answer>"),
            "expected": case.get("expected", case.get("reward", case.get("right"))),
        }
        for case in cases
    ]


def ours(case: Case) -> bool:
    reward_fn = question_only_reward_fn if case.get("kind") == "question_only" else r1_zero_reward_fn
    return reward_fn(case["response"], case["ground_truth"])["reward"] > 0.5


def answer_of(case: Case) -> str | None:
    if case.get("kind") == "question_only":
        return last_boxed(case["response"])
    return unboxed(tagged_answer(case["response"]) or "") if is_formatted(case["response"]) else None


def exact_string(case: Case) -> bool:
    answer = answer_of(case)
    return answer is not None and any(answer.strip() == truth.strip() for truth in truths_of(case["ground_truth"]))


def math_verify_judge() -> Judge:
    from math_verify import parse, verify

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    def judge(case: Case) -> bool:
        answer = answer_of(case)
        if answer is None:
            return False
        parsed = parse(f"${answer.strip().strip('$')}$")
        return any(verify(parse(f"${truth.strip().strip('$')}$"), parsed) for truth in truths_of(case["ground_truth"]))

    return judge


def reference_judge(spec: str) -> Judge:
    """Load the function FILE.py:FUNCTION, which is called with a response and its ground truth."""
    path, _, function = spec.rpartition(":")
    found = importlib.util.spec_from_file_location("reference", path)
    assert found is not None, path
    assert found.loader is not None, path
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)

    def judge(case: Case) -> bool:
        return getattr(module, function)(case["response"], case["ground_truth"])["reward"] > 0.5

    return judge


def judge_of(name: str, reference: str) -> Judge:
    match name:
        case "rlvr":
            return ours
        case "exact string":
            return exact_string
        case "Math-Verify":
            return math_verify_judge()
        case _:
            return reference_judge(reference)


def measure(name: str, cases: list[Case], reference: str) -> tuple[list[bool | None], list[float]]:
    """Return the verdict on each case, None if the grader raised, and the seconds of each."""
    judge = judge_of(name, reference)
    judge(cases[0])  # imports on first use do not count
    verdicts: list[bool | None] = []
    seconds = []
    for case in cases:
        started = time.perf_counter()
        try:
            verdicts.append(judge(case))
        except Exception:  # counts as not rewarded
            verdicts.append(None)
        seconds.append(time.perf_counter() - started)
    return verdicts, seconds


def in_a_process(name: str, cases: list[Case], reference: str) -> tuple[list[bool | None], list[float]]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (name, cases, reference))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path, nargs="*", help="files of cases (default: those of tests/fixtures)")
    parser.add_argument("--reference", default="", help="FILE.py:FUNCTION of the handout's reference")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=int, help="use only the first N cases")
    parser.add_argument("--hostile", action="store_true", help="include the hostile cases")
    parser.add_argument("--errors", type=int, default=0, help="print the first N wrong verdicts of each grader")
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    files = arguments.cases or sorted(TESTS.glob("grading_*.jsonl"))
    cases = [c for file in files for c in read_cases(file) if arguments.hostile or c.get("category") != "hostile"]
    cases = cases[: arguments.limit]
    if not cases:
        parser.error("there are no cases to grade")

    names = ["rlvr", "exact string"]
    if arguments.reference:
        names.append("reference")
    else:
        print(
            "the handout's reference is on no package index: its row is left out.  --reference FILE.py:r1_zero_reward_fn"
        )
    if importlib.util.find_spec("math_verify") is None:
        print("math_verify is not installed: its row is left out.  pip install 'math-verify[antlr4-13-2]'")
    else:
        names.append("Math-Verify")
    verdicts: dict[str, list[bool | None]] = {}
    rates: dict[str, list[float]] = {name: [] for name in names}
    slowest: dict[str, float] = dict.fromkeys(names, 0.0)
    for repeat in range(arguments.repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            verdicts[name], seconds = in_a_process(name, cases, arguments.reference)
            rates[name].append(len(cases) / sum(seconds))
            slowest[name] = max(slowest[name], *seconds)

    right = sum(bool(case["expected"]) for case in cases)
    work = f"{len(cases)} labeled cases of {', '.join(file.stem for file in files)}"
    print(f"{work}: {right} right and {len(cases) - right} wrong answers; one process")
    print(f"{'grader':14} {'accuracy':>9} {'FP':>5} {'FN':>5} {'raised':>7} {'calls/s':>9} {'slowest':>9}")
    middle = {name: statistics.median(values) for name, values in rates.items()}
    for name in names:
        wrong = [(c, bool(v)) for c, v in zip(cases, verdicts[name], strict=True) if bool(v) != bool(c["expected"])]
        rewarded = sum(verdict for _, verdict in wrong)
        raised = sum(verdict is None for verdict in verdicts[name])
        print(
            f"{name:14} {1 - len(wrong) / len(cases):9.4f} {rewarded:5} {len(wrong) - rewarded:5} {raised:7} "
            f"{middle[name]:9.0f} {slowest[name]:7.3f} s"
        )
        for case, verdict in wrong[: arguments.errors]:
            print(f"  {'' if verdict else 'not '}rewarded: {case['response'][-80:]!a} for {case['ground_truth']!r}")
    rows = [
        Row("grading, 1 process", work, name, "responses/s", middle["rlvr"], middle[name], GOALS[name])
        for name in names
        if name in GOALS
    ]
    for row in rows:
        print(f"rlvr beside {row.beside}: {row.ratio:.1f}x")
    write(arguments.json, rows)


if __name__ == "__main__":
    main()
