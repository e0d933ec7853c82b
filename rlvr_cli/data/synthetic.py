"""Verifiable tasks generated from a seed: last-digit arithmetic, multiplication and Countdown, each example with a trace for SFT.

Enters: a size, a seed, a split. Leaves: that many `Example`s, the same on every machine and Python, no question twice.

The first n examples do not depend on the size. Whether a question belongs to "train" or "validation" is a function of
the question alone, so the two splits share nothing, whatever the sizes and seeds. The responses begin right after the
`<think>` that ends the r1_zero prompt. Every draw goes through `Random.random`, the one method whose sequence Python
promises to keep.
"""

import hashlib
import json
from functools import cache
from random import Random

from rlvr_cli.errors import RlvrError
from rlvr_cli.types import Example

SPLITS = ("train", "validation")
VALIDATION_ONE_IN = 10  # questions, by hash
TERMS = 5  # digits in an arithmetic question: 100,000 questions in all
COUNTDOWN_LIMIT = 1_000_000  # far fewer puzzles than exist, so that new ones never run out
OPERATORS = {"+": 1, "-": 1, "*": 2, "/": 2}  # with their precedence


def split_of(question: str, *, one_in: int = VALIDATION_ONE_IN) -> str:
    """The split of a question: validation for one in so many, by its SHA-256."""
    digest = hashlib.sha256(question.encode()).digest()
    return "validation" if int.from_bytes(digest[:8], "big") % one_in == 0 else "train"


def arithmetic(
    size: int,
    *,
    seed: int = 0,
    split: str = "train",
    careful_share: float = 0.35,
    malformed_share: float = 0.05,
) -> list[Example]:
    """Questions such as "What is the last digit of 6+6+3+9+2?", whose answer is one digit.

    The traces are a mixture, so that a model fine-tuned on them is right some of the time and RL has something to
    reinforce: careful ones add one number at a time and keep the last digit, guesses name a random digit, and
    malformed ones guess and break the tags in one of three ways.

    Args:
        size: number of examples; at most what five digits allow (about 90,000 for train and 10,000 for validation).
        seed: which questions, in which order.
        split: "train" or "validation".
        careful_share: probability of a careful trace.
        malformed_share: probability of a malformed one; the rest are guesses.

    Raises:
        RlvrError: an unknown split, or more examples than there are questions.
    """
    assert min(careful_share, malformed_share) >= 0
    assert careful_share + malformed_share <= 1
    check_split(split)
    expected = 10**TERMS * (1 if split == "validation" else VALIDATION_ONE_IN - 1) // VALIDATION_ONE_IN
    if size > 0.9 * expected and size > _arithmetic_questions(split):  # counting them takes half a second
        raise RlvrError(
            f"There are only {_arithmetic_questions(split):,} arithmetic questions in the {split} split, not {size:,}.",
            "Ask for fewer.",
        )
    questions, traces = Random(f"arithmetic questions {seed}"), Random(f"arithmetic traces {seed} {split}")
    examples: list[Example] = []
    seen: set[str] = set()
    while len(examples) < size:
        digits = _digits(_below(questions, 10**TERMS))
        question = _arithmetic_question(digits)
        if question in seen:
            continue
        seen.add(question)
        if split_of(question) != split:
            continue
        # always three random numbers, so that the shares change a trace's kind but not the traces after it
        kind, guess, damage = traces.random(), _below(traces, 10), _below(traces, 3)
        if kind < careful_share:
            response = _careful_trace(digits)
        elif kind < careful_share + malformed_share:
            response = _malformed_trace(guess, damage)
        else:
            response = f" it looks like {guess} </think> <answer> {guess} </answer>"
        examples.append(
            Example(
                id=f"arithmetic-{split}-{seed}-{len(examples) + 1}",
                question=question,
                ground_truth=str(sum(digits) % 10),
                response=response,
            )
        )
    return examples


def multiplication(size: int, *, seed: int = 0, split: str = "train", tool_share: float = 0.35) -> list[Example]:
    """Questions such as "What is 47*83?", with two digits in each factor, whose traces ask a calculator or guess.

    A model fine-tuned on the traces asks the calculator some of the time, and RL can reinforce that: a tiny model cannot multiply.

    Args:
        size: number of examples; at most what four digits allow (about 7,300 for train and 800 for validation).
        seed: which questions, in which order.
        split: "train" or "validation".
        tool_share: probability of a trace that asks the calculator; the rest are guesses.

    Raises:
        RlvrError: an unknown split, or more examples than there are questions.
    """
    check_split(split)
    asked = Random(f"multiplication questions {seed}")
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    pairs = [pair for pair in pairs if split_of(_multiplication_question(*pair)) == split]
    if size > len(pairs):
        raise RlvrError(
            f"There are only {len(pairs):,} multiplication questions in the {split} split, not {size:,}.",
            "Ask for fewer.",
        )
    drawn = sorted((asked.random(), pair) for pair in pairs)[:size]
    traces = Random(f"multiplication traces {seed} {split}")
    examples: list[Example] = []
    for number, (_, (a, b)) in enumerate(drawn, start=1):
        uses_tool, guess = traces.random() < tool_share, 100 + _below(traces, 9900)
        turns = [
            ("policy", f" <calc>{a}*{b}</calc>"),
            ("calc", f"<out>{a * b}</out>"),
            ("policy", f" </think> <answer> {a * b} </answer>"),
        ]
        if not uses_tool:
            turns = [("policy", f" it looks like {guess} </think> <answer> {guess} </answer>")]
        examples.append(
            Example(
                id=f"multiplication-{split}-{seed}-{number}",
                question=_multiplication_question(a, b),
                ground_truth=str(a * b),
                response="".join(text for _, text in turns),
                turns=tuple(turns),
            )
        )
    return examples


def countdown(size: int, *, seed: int = 0, split: str = "train") -> list[Example]:
    """Puzzles that combine three or four numbers into a target from 10 to 99, reachable by construction.

    The ground truth is JSON text, ``{"numbers": [...], "target": N, "solution": "..."}``, where the solution uses every
    number once and no step leaves the positive integers. No two examples have the same numbers, in any order, and the
    same target, within a split or across the two. Every trace derives the solution step by step.

    Raises:
        RlvrError: an unknown split, or more than a million examples.
    """
    check_split(split)
    if size > COUNTDOWN_LIMIT:
        raise RlvrError(f"{size:,} Countdown puzzles are too many.", f"Ask for at most {COUNTDOWN_LIMIT:,}.")
    rng = Random(f"countdown {seed}")
    examples: list[Example] = []
    seen: set[str] = set()
    while len(examples) < size:
        numbers, target, solution, steps = _countdown_puzzle(rng)
        puzzle = f"{sorted(numbers)} {target}"
        if not 10 <= target <= 99 or target in numbers or puzzle in seen or split_of(puzzle) != split:
            continue
        seen.add(puzzle)
        examples.append(
            Example(
                id=f"countdown-{split}-{seed}-{len(examples) + 1}",
                question=countdown_question(numbers, target),
                ground_truth=json.dumps({"numbers": numbers, "target": target, "solution": solution}),
                response=f" {', '.join(steps)} </think> <answer> {solution} </answer>",
            )
        )
    return examples


def countdown_question(numbers: list[int], target: int) -> str:
    """The question for these numbers and this target."""
    return (
        f"Using the numbers {numbers}, write an expression that equals {target}. "
        "Use each number exactly once, with +, -, *, / and parentheses."
    )


def check_split(split: str) -> None:
    """Raise RlvrError unless generated data have this split."""
    if split not in SPLITS:
        raise RlvrError(f"Generated data has no split {split!r}.", f"Its splits are {' and '.join(SPLITS)}.")


def _below(rng: Random, n: int) -> int:
    return int(rng.random() * n)


def _multiplication_question(a: int, b: int) -> str:
    return f"What is {a}*{b}?"


def _arithmetic_question(digits: list[int]) -> str:
    return f"What is the last digit of {'+'.join(map(str, digits))}?"


@cache
def _arithmetic_questions(split: str) -> int:
    return sum(split_of(_arithmetic_question(_digits(number))) == split for number in range(10**TERMS))


def _digits(number: int) -> list[int]:
    return [int(digit) for digit in f"{number:0{TERMS}d}"]


def _careful_trace(digits: list[int]) -> str:
    steps: list[str] = []
    last = digits[0]
    for digit in digits[1:]:
        steps.append(f"{last}+{digit}={last + digit}")
        last = (last + digit) % 10
    return f" {', '.join(steps)} </think> <answer> {last} </answer>"


def _malformed_trace(guess: int, damage: int) -> str:
    return (
        f" it looks like {guess} <answer> {guess} </answer>",  # the thinking never ends
        f" it looks like {guess} </think>\n<answer> {guess} </answer>",  # r1_zero wants one space between the tags
        f" it looks like {guess} </think> {guess}",  # no answer tags
    )[damage]


def _countdown_puzzle(rng: Random) -> tuple[list[int], int, str, list[str]]:
    """(numbers, target, solution, steps of the solution in an order in which they can be computed)."""
    # half of the numbers have one digit: among larger ones hardly any product or quotient lands on a small target
    numbers = [1 + _below(rng, 9) if rng.random() < 0.5 else 10 + _below(rng, 90) for _ in range(3 + _below(rng, 2))]
    terms = [(number, str(number), 3) for number in numbers]  # value, text, precedence
    steps: list[str] = []
    while len(terms) > 1:
        left, left_text, left_binds = terms.pop(_below(rng, len(terms)))
        right, right_text, right_binds = terms.pop(_below(rng, len(terms)))
        results = {"+": left + right}
        if left > right:
            results["-"] = left - right
        if left > 1 and right > 1:
            results["*"] = left * right
        if right > 1 and left % right == 0:
            results["/"] = left // right
        operator = list(results)[_below(rng, len(results))]
        binds = OPERATORS[operator]
        if left_binds < binds:
            left_text = f"({left_text})"
        if right_binds <= binds:
            right_text = f"({right_text})"
        steps.append(f"{left}{operator}{right}={results[operator]}")
        terms.append((results[operator], f"{left_text}{operator}{right_text}", binds))
    target, solution, _ = terms[0]
    return numbers, target, solution, steps
