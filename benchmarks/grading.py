"""Graders side by side on labelled answers: accuracy, false positives, false negatives and speed, measured in one run.

    python benchmarks/grading.py cases.jsonl [--limit N] [--hostile] [--json out.json] [--errors N]

Enters: JSON lines with `response`, `ground_truth` (a string, a number, or a list of alternatives), `expected` (1 if it is to be rewarded)
and, optionally, `kind` (`r1_zero`, the default, or `question_only`) and `category`; cases of category `hostile` are left out
unless asked for, since Math-Verify spends seconds on some of them. Leaves: one row per grader.

The competitors get the answer as our extraction finds it, so that only the comparison of answer and truth is compared:
exact string equality after stripping, and Math-Verify, `verify(parse(truth), parse(answer))` with `$...$` put around both and its
own time limits on, as its README shows. Calls per second are of one process, in the order of the file.
"""

import argparse
import importlib.util
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlvr_cli.graders import question_only_reward_fn, r1_zero_reward_fn
from rlvr_cli.graders.extraction import last_boxed, tagged_answer, unboxed
from rlvr_cli.graders.r1_zero import is_formatted, truths_of

Case = dict[str, Any]
Judge = Callable[[Case], bool]


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


def measure(name: str, judge: Judge, cases: list[Case], errors: int) -> dict[str, Any]:
    judge(cases[0])  # imports on first use are no part of the speed
    false_positives, false_negatives, crashes, slowest = 0, 0, 0, 0.0
    seconds = 0.0
    shown = 0
    for case in cases:
        started = time.perf_counter()
        try:
            rewarded = judge(case)
        except Exception:  # a grader that raises has not rewarded
            rewarded, crashes = False, crashes + 1
        taken = time.perf_counter() - started
        seconds += taken
        slowest = max(slowest, taken)
        wrong = rewarded != bool(case["expected"])
        false_positives += wrong and rewarded
        false_negatives += wrong and not rewarded
        if wrong and shown < errors:
            shown += 1
            print(
                f"  {name}: {'rewarded' if rewarded else 'not rewarded'}: {case['response'][-80:]!a} for {case['ground_truth']!r}"
            )
    return {
        "grader": name,
        "accuracy": 1 - (false_positives + false_negatives) / len(cases),
        "false_positives": false_positives,
        "false_negatives": false_negatives,
        "exceptions": crashes,
        "calls_per_second": len(cases) / seconds,
        "slowest_seconds": slowest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--limit", type=int, help="take only the first N cases")
    parser.add_argument("--hostile", action="store_true", help="take the hostile cases too")
    parser.add_argument("--errors", type=int, default=0, help="print the first N wrong verdicts of each grader")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    with arguments.cases.open(encoding="utf-8") as lines:
        cases = [case for case in map(json.loads, lines) if arguments.hostile or case.get("category") != "hostile"]
    cases = cases[: arguments.limit]
    if not cases:
        parser.error("there are no cases to grade")

    judges: dict[str, Judge] = {"rlvr": ours, "exact string": exact_string}
    if importlib.util.find_spec("math_verify") is None:
        print("math_verify is not installed: its row is missing.  pip install 'math-verify[antlr4-13-2]'")
    else:
        judges["Math-Verify"] = math_verify_judge()
    rows = [measure(name, judge, cases, arguments.errors) for name, judge in judges.items()]

    right = sum(bool(case["expected"]) for case in cases)
    print(f"{len(cases)} cases, {right} right and {len(cases) - right} wrong answers; one process")
    print(
        f"{'grader':14} {'accuracy':>9} {'FP':>5} {'FN':>5} {'raised':>7} {'calls/s':>9} {'relative':>9} {'slowest':>9}"
    )
    for row in rows:
        relative = row["calls_per_second"] / rows[-1]["calls_per_second"]
        print(
            f"{row['grader']:14} {row['accuracy']:9.4f} {row['false_positives']:5} {row['false_negatives']:5} {row['exceptions']:7} "
            f"{row['calls_per_second']:9.0f} {relative:8.1f}x {row['slowest_seconds']:7.3f} s"
        )
    print(f"relative: to {rows[-1]['grader']}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"cases": len(cases), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
