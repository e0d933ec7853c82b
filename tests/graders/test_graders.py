"""Every named grader: formats, rewards, failure kinds, extraction, and reference responses."""

import dataclasses
import itertools
import json
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_cli import graders
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders import GRADERS, countdown, has_format_rule, reference_response, resolve_grader
from rlvr_cli.graders.answers.extraction import candidates, last_boxed, last_number, tagged_answer
from rlvr_cli.graders.custom import wants_example
from rlvr_cli.graders.question_only import question_only_reward_fn
from rlvr_cli.graders.r1_zero import FAILURE_KINDS, r1_zero_reward_fn
from rlvr_cli.types import WITH_FORMAT_RULE, Example

RIGHT = {"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0}
WRONG = {"format_reward": 1.0, "answer_reward": 0.0, "reward": 0.0}
UNFORMATTED = {"format_reward": 0.0, "answer_reward": 0.0, "reward": 0.0}


def needing(grader: str, *more: str):
    """A case of a grader, which may need a package."""
    return pytest.param(grader, *more, marks=[pytest.mark.extra("reasoning_gym")] * (grader == "reasoning_gym"))


def in_tags(answer: str) -> str:
    return f"reasoning </think> <answer> {answer} </answer>"


@pytest.mark.parametrize(
    ("response", "truth", "rewards"),
    [
        (in_tags("4a - 2"), "4a-2", RIGHT),
        (in_tags("$4a − 2$"), "4a-2", RIGHT),
        (in_tags("4 - 2a"), "4a-2", WRONG),
        (in_tags(r"\boxed{5}"), "5", RIGHT),
        (in_tags(r"so \boxed{4}, no, \boxed{5}"), "5", RIGHT),
        (in_tags(r"\boxed{5"), "5", WRONG),
        (in_tags("5"), r"\boxed{5}", RIGHT),
        (in_tags("5") + " Hope this helps!", "5", RIGHT),
        ("</think> <answer> 999 </answer> <answer> 5 </answer>", "5", RIGHT),
        ("</think> <answer> 5 </answer> <answer> 999 </answer>", "5", WRONG),
        ("</answer> r </think> <answer> 5", "5", RIGHT),  # the handout's rule requires the two strings, in any order
        ("r </think>\n<answer> 5 </answer>", "5", UNFORMATTED),
        ("r </think><answer> 5 </answer>", "5", UNFORMATTED),
        ("r </think>  <answer> 5 </answer>", "5", UNFORMATTED),
        ("r </think> <answer> 5", "5", UNFORMATTED),
        (in_tags("96"), 96.0, RIGHT),
        (in_tags("97"), 96, WRONG),
        (in_tags("6630"), ["6630.65", "6630"], RIGHT),
        (in_tags("1"), [], WRONG),
        ("", "5", UNFORMATTED),
    ],
)
def test_r1_zero_rewards(response, truth, rewards):
    assert r1_zero_reward_fn(response, truth) == rewards
    assert r1_zero_reward_fn(response, truth, fast=False) == rewards


@pytest.mark.parametrize(
    ("response", "truth", "rewards"),
    [
        (r"It is $\boxed{\frac{1}{2}}$.", "0.5", RIGHT),
        (r"\boxed{5} but on reflection $\boxed{777}$", "5", WRONG),
        (r"$\boxed{28}$ pct", r"28\%", RIGHT),
        (r"\fbox{5}", "5", RIGHT),
        ("The answer is 5.", "5", UNFORMATTED),
        (r"\boxed{5", "5", UNFORMATTED),
        (r"\boxed 5", "5", UNFORMATTED),
        (in_tags("5"), "5", UNFORMATTED),
    ],
)
def test_question_only_rewards(response, truth, rewards):
    assert question_only_reward_fn(response, truth) == rewards


@pytest.mark.parametrize("truth", [None, {"a": 1}, [None]])
def test_a_ground_truth_of_no_known_type_is_refused(truth):
    for reward_fn in (r1_zero_reward_fn, question_only_reward_fn):
        with pytest.raises(TypeError, match="ground truth"):
            reward_fn(in_tags("5"), truth)


def test_lenient_format_accepts_any_white_space_between_the_tags():
    literal, lenient = resolve_grader("r1_zero"), resolve_grader("r1_zero", format_rule="lenient")
    for gap in ("", " ", "  ", "\n", "\n\n\t"):
        response = f"r </think>{gap}<answer> 5 </answer>"
        assert lenient(response, "5").reward == 1.0
        assert literal(response, "5").reward == float(gap == " ")
    assert lenient("r </think> so <answer> 5 </answer>", "5").format_reward == 0.0


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (in_tags("5"), None),
        ("", "empty"),
        ("  \n", "empty"),
        (in_tags(""), "empty"),
        (in_tags("6"), "wrong_answer"),
        (in_tags("I do not know"), "unparsed_answer"),
        (in_tags(r"\foo{5}"), "unparsed_answer"),
        (in_tags(r"\boxed{5"), "unparsed_answer"),
        ("</think> <answer> 5 </answer> <answer> 6 </answer>", "multiple_answers"),
        ("I am still thinking about 7", "no_think_close"),
        ("<answer> 6 </answer>", "no_think_close"),
        ("r </think> it is 7", "no_answer_tags"),
        ("r </think> <answer> 7", "no_answer_tags"),
        ('r </think> <answer value="7"> </answer>', "malformed_tags"),
        ("r </think>\n<answer> 5 </answer>", "malformed_tags"),
        ("r </think> so <answer> 7 </answer>", "malformed_tags"),
        ("The answer is 5.", "correct_but_unformatted"),
        (r"so it is \boxed{5}", "correct_but_unformatted"),
        ("r </think> it is 5", "correct_but_unformatted"),
        ("<answer> 5 </answer>", "correct_but_unformatted"),
        ("so\n\\[\nx = 5\n\\]", "correct_but_unformatted"),
    ],
)
def test_failure_kinds_of_r1_zero(response, kind):
    verdict = resolve_grader("r1_zero")(response, "5")
    assert verdict.failure_kind == kind
    assert kind is None or kind in FAILURE_KINDS
    assert (verdict.reward == 1.0) is (kind is None)


@pytest.mark.parametrize(
    ("grader", "response", "kind"),
    [
        ("question_only", "", "empty"),
        ("question_only", "no idea", "no_answer_tags"),
        ("question_only", r"\boxed{6", "malformed_tags"),
        ("question_only", "The answer is 5.", "correct_but_unformatted"),
        ("question_only", r"\boxed{}", "empty"),
        ("question_only", r"\boxed{6}", "wrong_answer"),
        ("question_only", r"\boxed{who knows}", "unparsed_answer"),
        ("math_verify", "", "empty"),
        ("math_verify", "It is 6.", "wrong_answer"),
        ("gsm8k", "", "empty"),
        ("gsm8k", "nothing", "unparsed_answer"),
        ("gsm8k", "it is 6", "wrong_answer"),
    ],
)
def test_failure_kinds_of_the_other_graders(grader, response, kind):
    assert resolve_grader(grader)(response, "5").failure_kind == kind
    assert kind in FAILURE_KINDS


def test_the_extracted_answer_is_kept():
    assert resolve_grader("r1_zero")(in_tags(r"\boxed{6}"), "5").extracted_answer == "6"
    assert resolve_grader("gsm8k")("it costs $1,234.50.", "5").extracted_answer == "$1,234.50"


@pytest.mark.parametrize("grader", [needing(grader) for grader in GRADERS])
@pytest.mark.parametrize("answer", ["6" * 5_000, "6" + "+1" * 2_500])
def test_no_grader_keeps_a_long_answer_whole(grader, answer):
    truth = {"countdown": PUZZLE, "python": "assert f() == 5", "reasoning_gym": ENTRY, "multiple_choice": "A"}.get(
        grader, "5"
    )
    for response in (in_tags(answer), rf"\boxed{{{answer}}}", answer):
        kept = resolve_grader(grader)(response, truth).extracted_answer
        assert kept is None or len(kept) <= 1_000


def test_the_first_characters_of_a_long_answer_are_kept(tmp_path):
    assert resolve_grader("gsm8k")("12" + "6" * 5_000, "5").extracted_answer == "12" + "6" * 998
    assert resolve_grader("r1_zero")(in_tags("12" + "6" * 5_000), "5").extracted_answer == "12" + "6" * 998
    path = tmp_path / "mine.py"
    path.write_text("def grade(response, truth):\n    return {'reward': 0, 'extracted_answer': response}\n")
    try:
        assert resolve_grader(f"{path}:grade")("ab" * 5_000, "5").extracted_answer == "ab" * 500
    finally:
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        (in_tags("5"), "5", True),
        (r"Hence \boxed{\frac{1}{2}} as claimed.", "0.5", True),
        ("I get 3, then 4.\nFinal answer: $\\frac{1}{2}$", "0.5", True),
        ("**Answer:** 12 cm", "12", True),
        ("2 + 2 = 4\n#### 4", "4", True),
        ("Adding up gives\n\\[x = 7\\]", "7", True),
        ("first 3 and then 12 apples", "12", True),
        ("The answer is 3.5. That is all.", "3.5", True),
        ("The answer is:\n\\[\n  5\n\\]", "5", True),
        ("Thus,\n$$\nx = 5\n$$", "5", True),
        ("$$\nx = 6\n$$\nThus,\n$$ \nx = 5 \n  $$\n", "5", True),
        ("$$\nx = 5\n$$\nThus,\n$$\nx = 6\n$$", "5", False),
        ("We pay 5{,}000", "5000", True),
        ("The answer is **5**.", "5", True),
        ("**Answer: 5**", "5", True),
        ("**The answer is 5.** That is all.", "5", True),
        ("Answer:\n\n**5**", "5", True),
        ("The final answer is **12 apples**.", "12", True),
        ("The answer is x**2", "x^2", True),
        ("**Answer: 3*x + 1**", "3x + 1", True),
        (r"\frac{3}{4}", "3/4", True),
        (r"\frac{3}{4}", "4", False),
        (r"so \frac{3}{4} \foo{4} of it", "4", False),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        ("The area is 12 cm^2.", "12", True),
        ("It takes 1 1/2 cups", "1.5", True),
        (r"So 2\sqrt{3} cups", r"2\sqrt{3}", True),
        ("(1, 2)", "(1,2)", True),
        ("x+1", "1", False),
        ("x > 5", "5", False),
        ("x >= 5", "5", False),
        ("5 + 3i", "3i+5", True),
        ("a + b = 12", "12", True),
        ("a = 5, b = 7, a + b = 12", "12", True),
        ("She has 72!", "72", True),
        ("The total is 72!", "72", True),
        ("So he makes 24*3=$72 a week.", "72", True),
        ("That is 7*3=$21 a day", "21", True),
        ("35 pies - 8 pies = 27 pies", "27", True),
        ("27 pies", "27", True),
        ("14 + 8 = 22 CDs", "22", True),
        ("2*50g = 100g of cake", "100", True),
        ("1200m-300m = 900m", "900", True),
        ("48+24 = 72 clips altogether in April and May.", "72", True),
        ("24 + 40 = $64 for the glasses he wants to buy", "64", True),
        ("40/20 = 2 slices each. So cut it into 8 slices.", "8", True),
        ("5+99=104 games after 3 years", "104", True),
        ("50/3 = 16.7 bags, so she needs 17 bags", "17", True),
        ("1.2*60 = 72Mb per hour.", "72", True),
        ("x+1 apples are left.", "x+1", True),
        ("60/12 = 5 dozen", "5", True),
        ("60/12 = 5 dozen", "60", False),
        ("It takes 2 * 3/4 = 1 1/2 cups", "1.5", True),
        ("2 * 6 = 12 cm", "12 m", False),
        ("x = 5 or 6", "6", False),
        ("= 5 pi radians", "5", False),
        ("100/5 = 5A/5 or 20 = A.", "20", True),
        ("x - 3 = y", "3", False),
        ("- **42**", "42", True),
        ("- x + 3", "x + 3", True),
        ("(b) 42", "42", True),
        ("On day 3 we pay 5{,}000 all in all", "5000", True),
        ("The answer is 6.", "5", False),
        ("<answer> 6 </answer> although 5", "5", False),
    ],
)
def test_the_lenient_grader_finds_the_answer(response, truth, right):
    assert resolve_grader("math_verify")(response, truth).reward == float(right)


def test_finding_the_answer_is_linear():
    for text in ("answer" + " " * 2_990 + "is" + "\n" * 2_990, "answer" + " " * 5_990):
        assert candidates(text + "\n5") == ["5"]


def test_math_verify_is_used_where_our_grammar_ends():
    from rlvr_cli.graders.answers.math_verify_fallback import equal_by_math_verify

    assert equal_by_math_verify(r"\nabla f + 1", r"1 + \nabla f")
    assert not equal_by_math_verify(r"\nabla f + 2", r"1 + \nabla f")
    assert r1_zero_reward_fn(in_tags(r"\nabla f + 1"), r"1 + \nabla f", fast=False) == RIGHT
    assert resolve_grader("math_verify")(in_tags(r"\nabla f + 1"), r"1 + \nabla f").reward == 1.0
    for answer, truth in [
        ("5", "5"),
        ("36_8", "36"),
        (r"\foo 5 < x", "5"),
        ("five", "5"),
        (r"5 \rightarrow 6", "6"),
        (r"5 \mapsto 6", "6"),
        (r"x \to 5", "5"),
        (r"2 \nmid 3", "3"),
        (r"x \nless 5", "5"),
        (r"\not\sim 5", "5"),
        (r"\neg 5", "5"),
        (r"x \perp 5", "5"),
        ("9**9**9", r"\foo 5"),
        ("", "5"),
    ]:
        assert not equal_by_math_verify(answer, truth), (answer, truth)  # readable, or refused


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("She has 48 + 24 = 72 clips.", "72", True),
        ("so\n#### 72", "Natalia sold 24.\n#### 72", True),
        ("It costs $1,234.00.", "1234", True),
        ("72 is the number", "72.0", True),
        ("-5", "-5", True),
        ("10-5", "5", True),
        ("from 10 to −5", "-5", True),
        ("the total is .5", "0.5", True),
        ("half, 1/2", "0.5", True),
        ("half, 1/2", "2", False),
        ("It was 72, then 73", "72", False),
        ("#### 72 and not 73", "72", False),
        ("about 7.2", "72", False),
        ("1/0", "1", False),
        (r"\boxed{5{,}000}", "5000", True),
        (r"\boxed{5,\!000}", "5,000", True),
        (r"#### \$5\,000{,}000.50", "5000000.5", True),
        ("#### 5{,}000", "0", False),
    ],
)
def test_gsm8k_takes_the_last_number(response, truth, right):
    assert resolve_grader("gsm8k")(response, truth).reward == float(right)


def test_gsm8k_refuses_a_truth_without_a_number():
    with pytest.raises(ValueError, match="no number"):
        resolve_grader("gsm8k")("5", "five")


PUZZLE = json.dumps({"numbers": [44, 19, 35], "target": 875})
ENTRY = json.dumps({"family": "gcd", "config": {}, "entry": {"question": "Q", "answer": "5", "metadata": {}}})


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("(44 - 19) * 35", None),
        ("(44 - 19) * 35 = 875", None),
        (r"$(44 - 19) \times 35 = 875$.", None),
        ("35×(44−19)", None),
        (r"\boxed{35 * (44 - 19)}", None),
        ("44 - 19 * 35", "wrong_answer"),
        ("(44 - 19) * 35 * 1", "wrong_answer"),
        ("(44 - 19 + 44 - 44) * 35", "wrong_answer"),
        ("875", "wrong_answer"),
        ("25 * 35", "wrong_answer"),
        ("(44 - 19) * 35 = 876", "unparsed_answer"),
        ("875 = (44 - 19) * 35", "wrong_answer"),
        ("(44 - 19) ** 35", "unparsed_answer"),
        ("(44 - 19) 35", "unparsed_answer"),
        ("((44 - 19) * 35", "unparsed_answer"),
        ("44.0 - 19 * 35", "unparsed_answer"),
        ("__import__('os').system('true')", "unparsed_answer"),
        ("44 / (19 - 19) + 35", "unparsed_answer"),
        ("(" * 5_000 + "44", "unparsed_answer"),
        ("", "empty"),
    ],
)
def test_countdown(answer, kind):
    verdict = resolve_grader("countdown")(in_tags(answer), PUZZLE)
    assert verdict.format_reward == 1.0
    assert verdict.failure_kind == kind
    assert verdict.reward == float(kind is None)


def test_the_options_know_which_graders_have_a_format_rule():
    assert tuple(filter(has_format_rule, GRADERS)) == WITH_FORMAT_RULE
    for grader in ("", *WITH_FORMAT_RULE):  # "": chosen by the dataset
        assert resolve(EvalConfig, flags={"grader": grader, "format_rule": "lenient"}, command="eval").grader == grader
    resolve(EvalConfig, flags={"grader": "gsm8k", "format_rule": "literal"}, command="eval")


def test_countdown_has_the_r1_zero_format():
    assert resolve_grader("countdown")("(44 - 19) * 35", PUZZLE).category == "format_0_answer_0"
    tight = "r </think><answer> (44 - 19) * 35 </answer>"
    assert resolve_grader("countdown")(tight, PUZZLE).failure_kind == "malformed_tags"
    assert resolve_grader("countdown", format_rule="lenient")(tight, PUZZLE).reward == 1.0


@pytest.mark.parametrize(
    "truth", ["5", "[]", "{}", '{"numbers": "12", "target": 3}', '{"numbers": [1.5], "target": 3}', "{"]
)
def test_countdown_refuses_other_truths(truth):
    with pytest.raises(ValueError, match=r"must be whole|a countdown ground truth"):
        resolve_grader("countdown")(in_tags("1 + 2"), truth)


@given(st.lists(st.integers(1, 12), min_size=2, max_size=4), st.data())
@settings(max_examples=40)
def test_countdown_solver_finds_a_reachable_target(numbers, data):
    value = Fraction(numbers[0])
    for number in numbers[1:]:
        operation = data.draw(st.sampled_from("+-*/"))
        value = {"+": value + number, "-": value - number, "*": value * number, "/": value / number}[operation]
    if value.denominator != 1:
        return
    found = countdown.solution(numbers, int(value))
    assert found is not None
    assert countdown.solves(found, numbers, int(value))


def test_countdown_solver_against_every_expression_of_three_numbers():
    numbers = [2, 3, 7]
    reachable = set()
    for a, b, c in itertools.permutations(map(Fraction, numbers)):
        for f, g in itertools.product("+-*/", repeat=2):
            for left_first in (True, False):
                try:
                    value = _apply(g, _apply(f, a, b), c) if left_first else _apply(g, a, _apply(f, b, c))
                except ZeroDivisionError:
                    continue
                reachable.add(value)
    for target in range(-60, 61):
        assert (countdown.solution(numbers, target) is not None) == (target in reachable), target


def _apply(operation: str, a: Fraction, b: Fraction) -> Fraction:
    return {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[operation]()


CHOICE = '{"answer": "B", "options": ["10", "100", "1"], "subject": "virology"}'
TRUTHS = {
    "r1_zero": [r"\frac{1}{2}", r"\boxed{x^2+1}", r"\text{even}"],
    "question_only": [r"(-\infty, 3] \cup \{5\}"],
    "math_verify": [r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"],
    "gsm8k": ["48/2 = 24\n#### 1,072"],
    "countdown": [PUZZLE],
    "multiple_choice": ["D", CHOICE],
    "reasoning_gym": [ENTRY],
    "python": ["assert f(2) == 4", '[{"input": "2", "output": "4"}, {"input": "3", "output": "6"}]'],
}


@pytest.mark.parametrize(("grader", "truth"), [needing(g, truth) for g in GRADERS for truth in TRUTHS.get(g, ["7"])])
def test_a_perfect_model_is_rewarded(grader, truth):
    response = reference_response(grader, truth)
    assert response is not None
    assert resolve_grader(grader)(response, truth).reward == 1.0


def test_no_reference_response_without_a_right_answer():
    assert reference_response("countdown", json.dumps({"numbers": [1, 1], "target": 99})) is None
    assert reference_response("countdown", "not a puzzle") is None
    assert reference_response("gsm8k", "no number") is None
    assert reference_response("mine.py:grade", "5") == reference_response("r1_zero", "5")


def test_unknown_graders_are_named_with_the_list():
    with pytest.raises(RlvrError) as error:
        resolve_grader("r2_zero")
    assert "r2_zero" in error.value.problem
    assert all(name in error.value.hint for name in GRADERS)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (None, "no grader file"),
        ("def other(response, truth): return {}", "no function grade"),
        ("def grade(response: return", "is not Python"),
        ("def grade(response): return {}", "two arguments"),
        ("def grade(response, truth, *, strict): return {}", "two arguments"),
        ("def grade(*both, strict): return {}", "two arguments"),
        ("def grade(response, truth, question): return {}", "may also take a parameter example"),
        ("def grade(response, truth, example, question): return {}", "may also take a parameter example"),
        ("def grade(response, truth, example, /): return {}", "may also take a parameter example"),
        ("grade = lambda response, truth, question: {}", "may also take a parameter example"),
        ("raise RuntimeError('boom')\ndef grade(r, t): return {}", "could not be loaded: RuntimeError: boom"),
        ("raise SystemExit(0)\ndef grade(r, t): return {}", "could not be loaded: SystemExit: 0"),
        ("grade = 5", "is not a function"),
    ],
)
def test_a_user_s_grader_that_cannot_be_used(source, problem, tmp_path):
    path = tmp_path / "mine.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(RlvrError, match=problem):
        resolve_grader(f"{path}:grade")


def test_a_user_s_file_needs_a_function(tmp_path):
    with pytest.raises(RlvrError, match="names no function"):
        resolve_grader(str(tmp_path / "mine.py"))


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("{'format_reward': 1, 'answer_reward': 0.5, 'reward': 0.5}", (1.0, 0.5, 0.5, "wrong_answer", "format_1_answer_0")),
        ("{'answer_reward': True}", (1.0, 1.0, 1.0, None, "format_1_answer_1")),
        ("{'answer_reward': 0, 'reward': 0.5}", (1.0, 0.0, 0.5, "wrong_answer", "format_1_answer_0")),
        ("{'reward': 0, 'format_reward': 0}", (0.0, 0.0, 0.0, "no_format", "format_0_answer_0")),
        ("{'reward': 0, 'format_reward': 1}", (1.0, 0.0, 0.0, "wrong_answer", "format_1_answer_0")),
        ("{'answer_reward': 0, 'failure_kind': 'too_long', 'extracted_answer': 'x'}", (1.0, 0.0, 0.0, "too_long", "format_1_answer_0")),
        # nothing but a reward: no category is invented
        ("{'reward': 1.0}", (None, None, 1.0, None, "reward_only")),
        ("{'reward': 0.5}", (None, None, 0.5, "low_reward", "reward_only")),
        ("{'reward': 0.5, 'failure_kind': 'too_long'}", (None, None, 0.5, "too_long", "reward_only")),
        ("{'reward': 0.6, 'failure_kind': 'too_long'}", (None, None, 0.6, None, "reward_only")),
        ("1", (None, None, 1.0, None, "reward_only")),
        ("0.25", (None, None, 0.25, "low_reward", "reward_only")),
        ("True", (None, None, 1.0, None, "reward_only")),
        ("__import__('numpy').float32(0.5)", (None, None, 0.5, "low_reward", "reward_only")),
        ("__import__('numpy').bool_(True)", (None, None, 1.0, None, "reward_only")),
        ("{'reward': __import__('numpy').int64(2)}", (None, None, 2.0, None, "reward_only")),
        ("__import__('torch').tensor(0.75)", (None, None, 0.75, None, "reward_only")),
    ],
)  # fmt: skip
def test_a_user_s_grader(returned, expected, tmp_path):
    (tmp_path / "helper.py").write_text(f"RESULT = {returned}")
    (tmp_path / "mine.py").write_text("from helper import RESULT\n\ndef grade(response, truth):\n    return RESULT\n")
    try:
        verdict = resolve_grader(f"{tmp_path / 'mine.py'}:grade")("response", "truth")
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("helper", None)
    rewards = (verdict.format_reward, verdict.answer_reward, verdict.reward)
    assert (*rewards, verdict.failure_kind, verdict.category) == expected


@pytest.mark.parametrize(
    ("parameters", "asks"),
    [
        ("response, truth, example", True),
        ("response, truth, *, example", True),
        ("response, truth, example=None", True),
        ("response, truth, strict=True, *, example=None", True),
        ("*both, example", True),
        ("response, truth, strict=True", False),
        ("example, truth", False),
        ("response, example", False),
        ("*both, **more", False),
    ],
)
@pytest.mark.parametrize("form", ["def grade({}): return reward(locals())", "grade = lambda {}: reward(locals())"])
def test_a_user_s_grader_may_ask_for_the_example(tmp_path, parameters, asks, form):
    path = tmp_path / "mine.py"
    seen = "[v for v in names.values() if isinstance(v, dict) and 'question' in v]"
    path.write_text(
        f"def reward(names):\n    return {{'reward': 0, 'failure_kind': repr({seen})}}\n{form.format(parameters)}\n"
    )
    try:
        grade = resolve_grader(f"{path}:grade")
    finally:
        sys.path.remove(str(tmp_path))
    assert wants_example(grade) == asks
    example = dataclasses.asdict(Example("a", "How many?", "5"))
    assert grade("r", "5", *([example] if asks else [])).failure_kind == repr([example] if asks else [])
    if asks:
        known = dict.fromkeys(example) | {"ground_truth": "5"}
        assert grade("r", "5").failure_kind == repr([known])


@pytest.mark.parametrize("parameters", ["*, example", "example", "*, format_rule='literal', example"])
def test_a_built_in_grader_may_ask_for_the_example(tmp_path, monkeypatch, parameters):
    """A module of graders/ with `example`, called as the workers call it: by position."""
    (tmp_path / "asking.py").write_text(
        "from rlvr_cli.types import Grade\n\n\n"
        f"def grade(response, ground_truth, {parameters}):\n"
        "    return Grade(1.0, 0.0, 0.0, None, repr(example))\n"
    )
    monkeypatch.setattr(graders, "__path__", [*graders.__path__, str(tmp_path)])
    monkeypatch.setattr(graders, "GRADERS", (*GRADERS, "asking"))
    try:
        grade = resolve_grader("asking", format_rule="lenient")
    finally:
        sys.modules.pop("rlvr_cli.graders.asking")
    assert wants_example(grade)
    example = dataclasses.asdict(Example("a", "How many?", "5"))
    assert grade("r", "5", example).failure_kind == repr(example)
    assert grade("r", "5").failure_kind == repr(dict.fromkeys(example) | {"ground_truth": "5"})


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("'1.0'", r"it returned '1.0' \(str\), not a number or a dictionary"),
        ("None", "it returned None, not a number"),
        ("{}", "neither reward nor answer_reward: it has nothing"),
        ("{'score': 1}", "neither reward nor answer_reward: it has score"),
        ("{'reward': 'high'}", r"the reward that it returned is 'high' \(str\), not a number"),
        ("{'reward': float('nan')}", "the reward that it returned is nan, not a finite number"),
        ("float('inf')", "the reward that it returned is inf, not a finite number"),
        ("{'reward': 1, 'format_reward': 10**400}", "the format_reward that it returned is 1000"),
        ("(1, 1)", r"it returned \(1, 1\) \(tuple\)"),
        ("[0.5] * 1000", r"it returned \[0.5, .{180,200}… \(list\)"),
    ],
)
def test_a_user_s_grader_that_returns_something_else(returned, says, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"def grade(response, truth):\n    return {returned}\n")
    try:
        grade = resolve_grader(f"{path}:grade")
    finally:
        sys.path.remove(str(tmp_path))
    with pytest.raises(TypeError, match=says):
        grade("response", "truth")


def test_extraction_by_hand():
    assert tagged_answer("<answer> 1 </answer> <answer> 2 </answer> 3") == " 2 "
    assert tagged_answer("no tags") is None
    assert last_boxed(r"\boxed{1} \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{\left\{ 1 \right\}}") == r"\left\{ 1 \right\}"
    assert last_boxed(r"\boxed{1} and \boxed{2") == "1"
    assert last_boxed("nothing") is None
    assert [last_number(text) for text in ("a1", "x = 3.5.", "1,2,3", "v1.2.3", "none")] == [
        None,
        "3.5",
        "3",
        None,
        None,
    ]
    assert candidates("") == []


@given(st.text(max_size=80), st.sampled_from(["r1_zero", "question_only", "gsm8k"]))
def test_no_response_raises(text, name):
    grade = resolve_grader(name)
    for response in (text, in_tags(text), rf"\boxed{{{text}}}", "\\boxed{" * 500 + text):
        verdict = grade(response, "5")
        assert verdict.error is None
        assert (verdict.failure_kind in FAILURE_KINDS) is (verdict.reward == 0.0)


def test_importing_the_graders_is_light():
    code = "import sys, rlvr_cli.graders, rlvr_cli.graders.pool; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ["math_verify", "sympy", "mpmath", "torch", "numpy", "pyarrow", "rich"]
    assert _imported(code, heavy) == "[]"


def test_a_grading_process_imports_what_its_grader_needs():
    code = "import sys, rlvr_cli.graders.worker, rlvr_cli.graders.custom; print([m for m in sys.argv[1:] if m in sys.modules])"
    assert _imported(code, ["rlvr_cli.config", "rlvr_cli.graders.answers.equivalence", "concurrent.futures"]) == "[]"


def test_the_package_has_the_handouts_functions_and_nothing_unknown():
    assert graders.r1_zero_reward_fn is r1_zero_reward_fn
    assert graders.question_only_reward_fn is question_only_reward_fn
    assert graders.FAILURE_KINDS is FAILURE_KINDS
    assert not hasattr(graders, "r1_zero_reward")


def _imported(code: str, modules: list[str]) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True, env={"PYTHONPATH": _root()}
    )
    return run.stdout.strip()


def _root() -> str:
    import rlvr_cli

    return str(next(iter(rlvr_cli.__path__)).rsplit("/", 1)[0])
