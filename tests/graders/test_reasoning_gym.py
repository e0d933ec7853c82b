"""The grader `reasoning_gym`: every family is scored as the package scores it, from a stored row, and no answer runs as code."""

import ast
import json
import os
import subprocess
import sys
from datetime import date, time
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_cli.errors import RlvrError
from rlvr_cli.graders import has_unknown_answer, reasoning_gym, reference_response, resolve_grader
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.graders.reasoning_gym import EVALUATED_FORMULAS, EVALUATED_LISTS, entry_of, ground_truth_of, is_harmless

needs_package = pytest.mark.extra("reasoning_gym")
# A plain scorer; tuples; numbers as keys and no right answer; an exception; formulas; lists.
HANDFUL = ("gcd", "rearc", "graph_color", "prime_factorization", "countdown", "n_queens")
WITHOUT_ANSWER = {"boxnet", "rush_hour"}  # of which an entry says no answer that is right
GENEROUS = {"game_of_life_halting"}  # it takes any text for False
WRONG = "no answer of mine"
# The package's own scores, in a process of its own: of a family, or of all, by entry: [truth, reference, score, wrong answer's].
PACKAGE = """
import json, os, sys
replies, _ = os.fdopen(os.dup(1), "w"), os.dup2(2, 1)
import reasoning_gym
from reasoning_gym.factory import DATASETS
from rlvr_cli.graders.reasoning_gym import ground_truth_of, reference_response
def score(family, answer, entry):
    try:
        return family.score_answer(answer, entry)
    except Exception as error:
        return type(error).__name__
for name in sys.argv[2:] or sorted(set(DATASETS) - {"composite"}):
    family = reasoning_gym.create_dataset(name, size=3, seed=11)
    for entry in (family[index] for index in range(3)):
        truth = ground_truth_of(name, {}, entry)
        response = reference_response(truth) or ""
        answer = response.removeprefix("I know this one. </think> <answer> ").removesuffix(" </answer>")
        scores = score(family, answer, entry), score(family, sys.argv[1], entry)
        replies.write(json.dumps([name, truth, answer, *scores]) + "\\n")
"""


def truth_of(answer, family="gcd"):
    return json.dumps({"family": family, "config": {}, "entry": {"question": "Q", "answer": answer, "metadata": {}}})


def in_tags(answer):
    return f"so </think> <answer> {answer} </answer>"


@needs_package
@pytest.mark.parametrize("families", [HANDFUL, pytest.param((), marks=pytest.mark.slow, id="all")])
def test_families_are_scored_as_the_package_scores_them(families):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"}
    made = subprocess.run(
        [sys.executable, "-c", PACKAGE, WRONG, *families], env=environment, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    rows = [json.loads(line) for line in made.stdout.splitlines()]
    assert len(rows) == 3 * (len(families) or 105)
    with GraderPool("reasoning_gym", workers=1, timeout=60.0) as pool:
        right = pool.grade([(in_tags(answer), truth) for _, truth, answer, *_ in rows])
        wrong = pool.grade([(in_tags(WRONG), truth) for _, truth, *_ in rows])
    for (name, _, answer, of_right, of_wrong), good, bad in zip(rows, right, wrong, strict=True):
        assert (good.failure_kind == "empty") == (answer == ""), name
        if name in WITHOUT_ANSWER:
            assert answer == "", name
        else:
            assert (good.error or good.reward) == of_right == 1.0, name
        raised = isinstance(of_wrong, str)  # for an answer that the scorer cannot read
        assert (bad.error, bad.reward) == (None, 0.0 if raised else of_wrong), name
        assert bad.failure_kind == "unparsed_answer" or not raised, name
        assert raised or of_wrong < 1.0 or name in GENEROUS, name


@needs_package
def test_the_score_is_the_reward():
    grade = resolve_grader("reasoning_gym")
    right, part, wrong = (grade(in_tags(text), truth_of("12")) for text in ("12", "it is 12", "13"))
    assert (right.format_reward, right.answer_reward, right.reward, right.failure_kind) == (1.0, 1.0, 1.0, None)
    assert (part.format_reward, part.answer_reward, part.reward) == (1.0, 0.25, 0.25)  # 2 of 8 characters
    assert (part.failure_kind, part.extracted_answer) == ("wrong_answer", "it is 12")
    assert (wrong.format_reward, wrong.reward) == (1.0, 0.0)
    assert grade("<answer> 7 </answer> " + in_tags("13"), truth_of("12")).failure_kind == "multiple_answers"
    assert grade(in_tags(" "), truth_of("12")).failure_kind == "empty"


@needs_package
def test_the_prompt_says_where_the_answer_is():
    grade, example = resolve_grader("reasoning_gym"), {"prompt": "Answer in <answer> tags. Q"}
    boxed = r"so \boxed{7}, no, \boxed{12}"
    assert grade(boxed, truth_of("12"), {"prompt": "Q"}).reward == 1.0
    assert grade(boxed, truth_of("12")).reward == 1.0  # a prompt that is not known
    asked = grade(boxed, truth_of("12"), example)
    assert (asked.format_reward, asked.reward, asked.failure_kind) == (0.0, 0.0, "correct_but_unformatted")
    assert grade("so 12", truth_of("12"), {"prompt": "Q"}).format_reward == 0.0
    assert grade(in_tags(r"\boxed{12}"), truth_of("12"), example).reward == 1.0
    near = "so </think>\n<answer>12</answer>"
    assert grade(near, truth_of("12")).failure_kind == "malformed_tags"
    assert resolve_grader("reasoning_gym", format_rule="lenient")(near, truth_of("12")).reward == 1.0


@needs_package
@pytest.mark.parametrize(("most", "reward"), [(9, 0.01), (10, 1.0)])
def test_the_options_of_a_family_reach_its_scorer(most, reward):
    """puzzle24 takes no number above its option max_value."""
    entry = {"question": "Q", "answer": "10*2 + 2*2", "metadata": {}}
    truth = ground_truth_of("puzzle24", {"max_value": most}, entry)
    assert resolve_grader("reasoning_gym")(in_tags("10*2 + 2*2"), truth).reward == reward


@needs_package
def test_options_have_the_types_of_their_defaults():
    given = {"min_date": "2000-01-31", "max_time": "12:30:00"}
    config = reasoning_gym.open_family("time_intervals", given).config
    assert (config.min_date, config.max_time) == (date(2000, 1, 31), time(12, 30))
    assert (
        reasoning_gym.open_family("word_sorting", {"transformation": "uppercase"}).config.transformation.value
        == "uppercase"
    )
    board = reasoning_gym.open_family("rearc", {"board_format_opts": {"col_delimiter": "|"}}).config.board_format_opts
    assert board.col_delimiter == "|"
    assert reasoning_gym.option_defaults("gcd") == {
        "min_numbers": 2,
        "max_numbers": 2,
        "min_value": 1,
        "max_value": 1000,
    }


@needs_package
def test_a_mixture_is_scored_by_the_families_in_it(tmp_path):
    config = {
        "datasets": [
            {"name": "countdown", "weight": 2},
            {"name": "word_sorting", "config": {"transformation": "uppercase"}},
        ]
    }
    metadata = {"source_dataset": "countdown", "numbers": [44, 19, 35], "target": 875}
    truth = ground_truth_of("composite", config, {"question": "Q", "answer": "", "metadata": metadata})
    grade = resolve_grader("reasoning_gym")
    assert grade(in_tags("(44 - 19) * 35"), truth).reward == 1.0
    path = tmp_path / "made"
    assert grade(in_tags(f"open({str(path)!r}, 'w')"), truth).reward == 0.01
    assert not path.exists()


@needs_package
@pytest.mark.parametrize("family", sorted(EVALUATED_LISTS | EVALUATED_FORMULAS))
def test_no_answer_runs_as_code(family, tmp_path):
    metadata = {"numbers": [1], "target": 1, "variable": "x", "integrand": "2*x", "valid_answers": ["1"]}
    entry = {"question": "Q", "answer": "1", "metadata": metadata}
    truth = json.dumps({"family": family, "config": {}, "entry": entry})
    grade, path = resolve_grader("reasoning_gym"), tmp_path / "made"
    hostile = f"open({str(path)!r}, 'w')"
    for answer in (
        hostile,
        f"[{hostile}]",
        f"[{hostile} for i in (1, 2)]",
        f"1 + {hostile}",
        f"x*sin({hostile})",
        f"{hostile}!",
    ):
        verdict = grade(in_tags(answer), truth)
        assert verdict.reward is not None
        assert verdict.reward <= 0.01
        assert not path.exists()


@needs_package
def test_the_tables_name_every_scorer_that_evaluates_answers():
    """A new version of the package may evaluate more: its scorers are searched for eval, exec and SymPy's parser."""
    spec = find_spec("reasoning_gym")
    assert spec is not None
    assert spec.origin is not None
    found = set()
    for path in Path(spec.origin).parent.rglob("*.py"):
        if "eval(" not in (text := path.read_text()) and "exec(" not in text and "parse_expr" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name == "score_answer":
                calls = [ast.unparse(call) for call in ast.walk(node) if isinstance(call, ast.Call)]
                evaluated = [
                    c for c in calls if c.split("(")[0].split(".")[-1] in ("eval", "exec", "parse_expr", "sympify")
                ]
                if any("answer" in call.partition("(")[2] and "entry[" not in call for call in evaluated):
                    found.add(path.stem)
    assert found == EVALUATED_LISTS | EVALUATED_FORMULAS


@pytest.mark.parametrize(
    ("family", "answer", "harmless"),
    [
        ("gcd", "exit()", True),  # compared as text
        ("spiral_matrix", "1 2 3", True),
        ("spiral_matrix", "[1, -2, [3]]", True),
        ("spiral_matrix", " [exit()]", False),
        ("n_queens", "_ Q _\nQ _ _", True),
        ("n_queens", "[['_', 'Q']]", True),
        ("n_queens", "[x := 5]", False),
        ("n_queens", "[f'{exit()}']", False),
        ("string_insertion", "ABCDE", True),
        ("string_insertion", "['A', 'B']", True),
        ("binary_matrix", "[a.b]", False),
        ("countdown", "(44 - 19) * 35", True),
        ("countdown", "exit()", False),
        ("countdown", "44!", False),
        ("puzzle24", "'24'", False),
        ("simple_integration", "x**2/2 + C", True),
        ("intermediate_integration", "exp(x)*sin(2*x) - pi*log(x)", True),
        ("intermediate_integration", "2*Integral(x**2*cos(x), x) + C", True),  # as some of the package's own answers
        ("intermediate_integration", "exec(x)", False),
        ("intermediate_integration", "sin(x)(1)", False),
        ("polynomial_multiplication", "2*x**3 - 4*y", True),
        ("polynomial_multiplication", "(lambda: 1)()", False),
    ],
)
def test_what_may_be_evaluated(family, answer, harmless):
    assert is_harmless(family, answer) == harmless


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.integers()), inner)
    ),
)


@settings(max_examples=40)
@given(values, st.dictionaries(st.text(), st.integers() | st.text()))
def test_an_entry_is_the_same_after_it_was_stored(metadata, config):
    entry = {"question": "Q", "answer": None, "metadata": {"given": metadata}}
    family, options, read = entry_of(ground_truth_of("gcd", config, entry))
    assert (family, options) == ("gcd", config)
    assert repr(read) == repr(entry)  # an int is no float, a tuple no list


def test_what_cannot_be_stored_is_said():
    with pytest.raises(TypeError, match="set"):
        ground_truth_of("gcd", {}, {"question": "Q", "answer": "1", "metadata": {1, 2}})


@pytest.mark.parametrize("truth", ["5", "{}", '{"family": "gcd", "config": {}, "entry": {}}', "not JSON"])
def test_a_bad_ground_truth_is_an_error(truth):
    with pytest.raises(ValueError, match="a ground truth of reasoning-gym is"):
        entry_of(truth)
    assert reference_response("reasoning_gym", truth) is None


def test_an_example_answer_stands_for_a_right_one():
    entry = {"question": "Q", "answer": None, "metadata": {"possible_answer": {0: 1}}}
    assert reference_response("reasoning_gym", ground_truth_of("graph_color", {}, entry)) == (
        'I know this one. </think> <answer> {"0": 1} </answer>'
    )
    unknown = ground_truth_of("boxnet", {}, entry | {"metadata": {}})
    assert reference_response("reasoning_gym", unknown) is None
    assert has_unknown_answer("reasoning_gym", unknown)
    assert not has_unknown_answer("reasoning_gym", "5")
    assert not has_unknown_answer("countdown", '{"numbers": [1, 1], "target": 99}')
    assert not has_unknown_answer("mine.py:grade", "5")


def test_the_package_that_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(RlvrError, match=r"(?s)reasoning-gym is not installed.*pip install -e '\.\[reasoning-gym\]'"):
        resolve_grader("reasoning_gym")
    with pytest.raises(RlvrError):
        reasoning_gym.open_family("gcd", {})
