"""Which answers are the same: a table of notations, the settled policy cases, identities, and hostile text."""

import itertools
import json
import string
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_cli.graders.answers import formula, objects
from rlvr_cli.graders.answers.equivalence import equivalent, readable
from rlvr_cli.graders.answers.notation import MAX_DEPTH, MAX_LENGTH, Unreadable, tokens_of
from rlvr_cli.graders.answers.reading import reader, readings
from rlvr_cli.graders.r1_zero import grade

DATA = Path(__file__).parents[2] / "fixtures"


def lines_of(name: str) -> list[dict]:
    with (DATA / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_notation():
    cases = lines_of("grading_notation.jsonl")
    assert [c for c in cases if equivalent(c["answer"], c["ground_truth"]) is not c["right"]] == []


def test_settled_policy_cases():
    for case in lines_of("grading_policy.jsonl"):
        verdict = grade(case["response"], case["ground_truth"])
        assert (verdict.format_reward, verdict.reward) == (case["format_reward"], case["reward"]), case


GOLDS = [
    r"\frac{3\sqrt{3}}{4}", r"\left[\frac{\pi}{2},\frac{5\pi}{3}\right]", r"(-\infty,-8)\cup (8,\infty)", r"x^3+3x-6",
    r"f^{-1}(x)=\frac{x-3}{2}", r"5.4 \text{ cents}", r"\$32,\!348", r"\left(\frac{3}{2},-13\right)", r"\text{ellipse}",
    r"\begin{pmatrix} 4 \\ -7 \end{pmatrix}", r"1,\frac{-1+\sqrt{5}}{2},\frac{-1-\sqrt{5}}{2}", r"-1 \pm \sqrt{6}",
    r"\log_3 \frac{5}{2}", r"\lfloor \sqrt{n} \rfloor", r"\frac{(2n)!}{n!(n+1)!}", r"\angle ABC = 45^\circ", r"3:1",
    r"0.\overline{36}", r"1.25 \times 10^{-4}", r"14\%", r"-2\frac{3}{4}", r"11011_2", r"\text{C, D, E}", r"\emptyset",
    r"\left\{ \frac{1}{2}, 3 \right\}", r"[-1,1] \cup \{2\}", r"\mathbb{R}", r"-\frac{1}{2} \leq x < 3", r"x=2, y=-1",
    r"\frac{x^2}{9} + \frac{y^2}{25} = 1", r"x = \frac{-b \pm \sqrt{b^2-4ac}}{2a}", r"1, 2, 3, \ldots, 10", r"\sec^2 x",
    r"\max\{a,b\}", r"\int_0^1 x\,dx", r"15\text{ mph}", r"C_{10}^{3}", r"\sqrt[4]{5}", r"\text{2:05 p.m.}", r"(a+b)(a-b)",
]  # fmt: skip
FRAMES = [
    "{}", " {}\n", "${}$", "$${}$$", r"\({}\)", r"\[{}\]", r"\boxed{{{}}}", r"$\boxed{{{}}}$", "{}.", "${}$.", "**{}**",
    r"$\displaystyle {}$", "The answer is ${}$.", "The final answer is ${}$", "Answer: {}", r"So it is $\boxed{{{}}}$.",
]  # fmt: skip


@pytest.mark.parametrize("gold", GOLDS)
def test_text_around_an_answer_changes_nothing(gold):
    assert [frame for frame in FRAMES if not equivalent(frame.format(gold), gold)] == []
    assert equivalent(gold.replace(r"\frac", r"\dfrac").replace("-", "−"), gold)


@pytest.mark.parametrize("gold", GOLDS)
def test_another_digit_is_another_answer(gold):
    for index, character in enumerate(gold):
        if character.isdigit():
            near = gold[:index] + str((int(character) + 1) % 10) + gold[index + 1 :]
            assert not equivalent(near, gold), near


def test_golds_are_all_different():
    for index, left in enumerate(GOLDS):
        for right in GOLDS[index + 1 :]:
            assert not equivalent(left, right), (left, right)
            assert not equivalent(right, left), (right, left)


@given(st.text(max_size=60))
def test_no_text_raises_and_every_text_is_itself(text):
    assert equivalent(text, "x+1") in (True, False)
    assert readable(text) in (True, False)
    if text.strip():
        assert equivalent(text, text)


PIECES = r"""
    \frac \sqrt { } ( ) [ ] \{ \} \begin{pmatrix} \end{pmatrix} & \\ , ; : = < > \le \in \cup \setminus \mathbb{R}
    + - * / ^ _ ! % $ | 1 10 0.5 1,234 x e i \pi \sin log \binom C U and or \text{and} \text{cm} cm the is not \pm °
    \lfloor \rfloor \infty f( \over \choose \overline \pmod \boxed{ ** ... \left( \right) \, million percent (A) @ 9^9
"""


@given(
    st.lists(st.sampled_from(PIECES.split()), min_size=1, max_size=40),
    st.sampled_from(["", " "]),
    st.sampled_from(GOLDS),
)
@settings(max_examples=120)
def test_random_notation_never_raises(pieces, glue, gold):
    text = glue.join(pieces)
    assert equivalent(text, gold) in (True, False)
    assert equivalent(text, text)


HUGE = [  # 9^910 is a whole number too large for a float
    ("9^{910}", "9^{910}", True),
    ("9^{910}", r"\frac{3\sqrt{3}}{4}", False),
    ("-9^{910}", r"-\pi", False),
    (r"9^{910}\%", r"\sqrt{2}", False),
    (r"9^{910}^\circ", r"\pi", False),
    (r"9^{910}x = \sqrt{2}", "x = 1", False),
    ("9^{910} x = 9^{910}", "x = 1", True),
    ("9^{910} x < 9^{910}", "x < 1", True),
    ("9^{910} x > 9^{910}", "x < 1", False),
    (r"9^{910} \approx 5", "5", False),
    (r"\sqrt{2} \approx 9^{910}", "5", False),
    (r"\mathbb{R} \setminus \{9^{910}, \sqrt{2}\}", r"\mathbb{R} \setminus \{\sqrt{2}, 9^{910}\}", True),
    (r"\{9^{910}, \sqrt 2\}", r"\{\sqrt 2, 9^{910}\}", True),
    (r"(9^{910}, \infty)", r"(\sqrt 2, \infty)", False),
    (r"9^{910} \pm \sqrt{2}", r"1 \pm \sqrt{2}", False),
]


@pytest.mark.parametrize(("answer", "truth", "same"), HUGE)
def test_numbers_that_no_float_can_hold(answer, truth, same):
    assert equivalent(answer, truth) is same
    assert equivalent(truth, answer) is same


def test_a_function_of_the_sign_or_the_order_of_names_is_not_one_of_them():
    subscripts = ("", "_2", "_3", "_4", "_5", "_n", "_{10}")
    names = [letter + end for letter in [*string.ascii_letters, r"\eta", r"\Phi"] for end in subscripts]
    names = [name for name in names if name not in ("e", "i")]
    wrong = [(f"|{name}|", name) for name in names] + [(rf"\frac{{|{name}|}}{{{name}}}", "1") for name in names]
    letters = [name for name in names if len(name) == 1 and name.islower()]
    wrong += [(r"\alpha\sqrt{\beta}", r"\sqrt{\alpha^2\beta}"), ("|x| < 3", "x < 3"), ("y = |x|", "y = x")]
    wrong += [(f"max({a},{b})", a) for a in letters for b in letters if a != b]
    wrong += [(f"min({a},{b})", a) for a, b in itertools.pairwise(letters)]
    assert [(answer, truth) for answer, truth in wrong if equivalent(answer, truth)] == []
    for right, truth in (
        ("|x| + x = 0", "|x| = -x"),
        (r"\sqrt{x_2^2}", "|x_2|"),
        ("max(a, x)", "max(x, a)"),
        (r"\frac{a+x+|a-x|}{2}", "max(a,x)"),
    ):
        assert equivalent(right, truth), right


@pytest.mark.parametrize("text", [r"\frac10e1", r"1,234\frac10e1,234", r"\frac12.", r"\frac12e", r"\sqrt2e5"])
def test_the_rest_of_a_number_after_its_first_digits_may_be_unparsable(text):
    for other in ("5", "x=2, y=-1", text):
        assert equivalent(text, other) is (text == other)
        assert equivalent(other, text) is (text == other)


@given(st.fractions(max_denominator=10**6), st.integers(2, 9))
def test_fractions_are_equal_in_every_form_and_both_ways(value, factor):
    forms = [
        f"\\frac{{{value.numerator}}}{{{value.denominator}}}",
        f"{value.numerator * factor}/{value.denominator * factor}",
        f"-\\frac{{{-value.numerator * factor}}}{{{value.denominator * factor}}}",
    ]
    if value > 1 and value.denominator > 1:
        whole, rest = divmod(value.numerator, value.denominator)
        forms.append(f"{whole}\\frac{{{rest}}}{{{value.denominator}}}")
    for left in forms:
        for right in forms:
            assert equivalent(left, right), (left, right)
        assert not equivalent(left, str(value + Fraction(1, value.denominator)))


@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6, unique=True), st.randoms(use_true_random=False))
def test_lists_have_no_order_and_tuples_have_one(numbers, random):
    shuffled = random.sample(numbers, len(numbers))
    given_order, other = ", ".join(map(str, numbers)), ", ".join(map(str, shuffled))
    assert equivalent(other, given_order)
    assert equivalent(f"\\{{{other}\\}}", given_order)
    assert equivalent(f"({other})", f"({given_order})") is (shuffled == numbers)
    assert not equivalent(", ".join(map(str, numbers[1:])), given_order)


@given(st.lists(st.integers(-9, 9), min_size=3, max_size=5), st.integers(-9, 9))
def test_polynomials_are_compared_as_functions(coefficients, root):
    expanded = [0] * (len(coefficients) + 1)
    for power, coefficient in enumerate(coefficients):
        expanded[power + 1] += coefficient
        expanded[power] -= root * coefficient

    def written(values: list[int]) -> str:
        return " + ".join(f"({value})x^{{{power}}}" for power, value in enumerate(values))

    assert equivalent(f"(x - ({root}))({written(coefficients)})", written(expanded))
    expanded[0] += 1
    assert not equivalent(f"(x - ({root}))({written(coefficients)})", written(expanded))


BOMBS = r"""
    9**9**9**9
    9^{9^{9}}-9^{9^{9}}+4
    100000000!
    (10**9)!/(10**9-1)!
    1.0000001^{10^{15}}
    \binom{10^9}{5}
    1e999999999
    2^{2^{2^{2^{2^2}}}}
    \sqrt[10^9]{10^{10^9}}
    (a+b+c+d+e)^{999999}
    i^{i^{9^{9^9}}}
"""


@pytest.mark.parametrize("text", BOMBS.split())
def test_bombs_have_no_value(text):
    """No value is computed: only the spellings are compared."""
    for node in readings.readings(text):
        if isinstance(node, objects.Value):
            assert all(node.formula.value(point) is None for point in formula.POINTS)
    assert not equivalent(text, "5")
    assert equivalent(text, f"${text}$")


def test_exact_integers_stay_within_their_bits():
    assert formula.parse_formula(tokens_of("2^{9999}")).value(0) == 2**9999
    assert formula.parse_formula(tokens_of("2^{20001}")).value(0) is None
    assert equivalent("2^{1009}", "2 \\cdot 2^{1008}")
    assert not equivalent("2^{1009}+1", "2^{1009}")


NESTS = [
    ("(", ")"), ("[", "]"), (r"\{", r"\}"), ("(", ") cm"), (r"\cup (x<", r"\cup)"), (r"\begin{matrix}", r"\end{matrix}"), ("(1,", ")"),
    ("|", "|"), (r"\frac{", "}{2}"), (r"\sqrt{", "}"), ("x^{", "}"), (r"(\pm 1, ", ")"), (r"\text{", "}"), (r"\boxed{", "}"),
    ("{", "} cm"), ("(1:", ") cm"), ("(the answer is ", ")"), (r"\{x|x>", r"\}"), ("-(", "%)"), (r"\sin(", ")"),
]  # fmt: skip


@pytest.mark.parametrize(("opening", "end"), NESTS)
@pytest.mark.parametrize("depth", [9, 39, 20_000])
def test_nesting_is_bounded(opening, end, depth, monkeypatch):
    """However deep, reading a text takes at most a fixed number of steps."""
    steps = 0
    original = reader.read_one

    def counted(tokens):
        nonlocal steps
        steps += 1
        return original(tokens)

    monkeypatch.setattr(reader, "read_one", counted)
    readings.readings.cache_clear()
    text = opening * depth + "@" + end * depth
    assert readings.readings(text) is not None
    assert steps <= reader._MAX_WORK + 1
    readings.readings.cache_clear()


def test_work_is_capped(monkeypatch):
    text = "1, 2, 3, 4, 5, 6, 7, 8"
    for limit, count in ((3, 0), (100, 1)):
        monkeypatch.setattr(reader, "_MAX_WORK", limit)
        readings.readings.cache_clear()
        assert len(readings.readings(text)) == count
    readings.readings.cache_clear()


def test_length_and_depth_are_capped():
    assert tokens_of("x" * MAX_LENGTH)
    with pytest.raises(Unreadable):
        tokens_of("x" * (MAX_LENGTH + 1))
    with pytest.raises(Unreadable):
        tokens_of("(" * (MAX_DEPTH + 1))
    assert equivalent("1" * 5_000, "1" * 5_000)
    assert not equivalent("1" * 5_000, "1" * 4_999 + "2")


def injections(canary: Path) -> list[str]:
    """500 strings that would create the file if any of them were executed."""
    target = str(canary)
    calls = [
        f"open('{target}','w')", f"__import__('os').system('touch {target}')", f"exec(\"open('{target}','w')\")",
        f"eval(\"open('{target}','w')\")", f"().__class__.__base__.__subclasses__()[0]('{target}')",
        f"getattr(__builtins__,'open')('{target}','w')", f"$(touch {target})", f"`touch {target}`", f"; touch {target} ;",
        f"\\write18{{touch {target}}}", f"\\input|\"touch {target}\"", f"{{{{''.__class__}}}} {target}",
        f"lambda: open('{target}','w')", f"[open('{target}','w') for _ in '1'][0]", f"sympify('open(\"{target}\",\"w\")')",
        f"Function('f')(open('{target}','w'))", f"S('open(\"{target}\",\"w\")')", f"\\text{{open('{target}','w')}}",
        f"!!python/object/apply:os.system ['touch {target}']", f"%(touch {target})s",
    ]  # fmt: skip
    frames = [
        "{}", "5 + {}", "{} or 5", r"\frac{{{}}}{{1}}", r"\boxed{{{}}}", "({},2)", "x = {}", r"\sqrt{{{}}}", "5 if {} else 6",
        r"\{{{}\}}", "[{}]", "{}**2", r"\log({})", r"\begin{{pmatrix}} {} \\ 2 \end{{pmatrix}}", "{}!", "f({})", "|{}|", "5 {}",
        r"\operatorname{{{}}}", "[0, {})", "x < {}", "{}%", "${}$", "The answer is {}.", "{}_8",
    ]  # fmt: skip
    return [frame.format(call) for call in calls for frame in frames]


@pytest.mark.parametrize("fast", [True, False], ids=["own grammar", "with Math-Verify"])
def test_injections_execute_nothing(fast, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    canary = tmp_path / "canary"
    strings = injections(canary)
    assert len(strings) == 500
    for text in strings:
        verdict = grade(f"r </think> <answer> {text} </answer>", "(1,2)", fast=fast)
        assert verdict.format_reward == 1.0
        assert verdict.reward == 0.0, text
    assert list(tmp_path.iterdir()) == []


def test_hedged_answers_are_wrong():
    for hedge in (
        "5 or 6",
        "It is 5. It is 6.",
        "5, 6",
        "5 and 6",
        "either 5 or 6",
        "not 5",
        "5 < x",
        "at least 5",
        "between 5 and 6",
        string.digits,
    ):
        assert not equivalent(hedge, "5"), hedge
