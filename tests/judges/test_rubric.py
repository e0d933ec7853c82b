"""Rubrics: what a file means, which last lines are scores of its scale, and what is refused before anybody is asked."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judging import RUBRIC, write_rubric
from rlvr_cli.errors import RlvrError
from rlvr_cli.judges.rubric import PAIRWISE, NoScore, read_rubric, read_scale


def scale(text: str):
    return read_scale(text, where="it")


@pytest.mark.parametrize(
    ("of", "reply", "text", "reward"),
    [
        ("1-10", "Good.\n8", "8", 7 / 9),
        ("1-10", "8", "8", 7 / 9),
        ("1-10", "Long.\n\n**Score: 10/10**\n\n  \n", "10", 1.0),
        ("1-10", "Score:** 1", "1", 0.0),
        ("1-10", "## Final rating: [[7.5]]", "7.5", 6.5 / 9),
        ("1-10", "first 3\nThe score is 4.", "4", 3 / 9),
        ("0-1", "0.25", "0.25", 0.25),
        ("5-1", "2", "2", 0.75),  # the first bound is the worst
        ("-1 to 1", "-0.5", "-0.5", 0.25),
        ("yes/no", "Because.\nYes.", "yes", 1.0),
        ("yes/no", 'Verdict: "no"', "no", 0.0),
        ("good/fair/bad", "`fair`", "fair", 0.5),
        ("yes=1, partly = 0.3, no=0", "Answer: Partly", "partly", 0.3),
        ("fully right/wrong", "**Fully  right**", "fully right", 1.0),
        ("[[A]]/[[B]]/[[C]]", "Because.\n[[B]]", "b", 0.5),  # the scale may be written as the reply shall be
        ('"yes"/"no"', "no", "no", 0.0),
        ("**good** = 0.9, **bad** = 0.1", "Verdict: **Good**", "good", 0.9),
        ("yes/no", '- Verdict: "yes".', "yes", 1.0),
        ("yes/no", "> - **no**", "no", 0.0),
        ("yes/no", "...yes", "yes", 1.0),
        ("1-10", "- **Score: 8/10**", "8", 7 / 9),
        ("1-10", "- 8", "8", 7 / 9),
        ("-1 to 1", "-1", "-1", 0.0),
        ("-1 to 1", "**-1**", "-1", 0.0),
        ("-1 to 1", "- Score: 1", "1", 1.0),
        ("-1 to 1", "- **1**", "1", 1.0),
        ("-1 to 1", "- -1", "-1", 0.0),
        ("-1 to 1", "-.5", "-.5", 0.25),
        ("0-10", ".5", ".5", 0.05),
        ("0-1", "**Score: .5**.", ".5", 0.5),
        ("0-.5", ".25", ".25", 0.5),
        ("-1=0, 0=0.5, 1=1", "-1", "-1", 0.0),
        ("-1=0, 0=0.5, 1=1", "- **1**", "1", 1.0),
        ("-1=0, 0=0.5, 1=1", "- Score: -1.", "-1", 0.0),
        ("0=0, 1=1", "- 1", "1", 1.0),
        ("0=0, .5=0.5, 1=1", "**.5**.", ".5", 0.5),
        ("1-10", "**Score**: 8", "8", 7 / 9),
        ("1-10", "**Score:** **8**/10", "8", 7 / 9),
        ("1-10", "`Score`: `8` / `10`", "8", 7 / 9),
        ("1-10", "- **Score**: 8", "8", 7 / 9),
        ("1-10", "```text\n8\n```\n", "8", 7 / 9),
        ("1-10", "8\n***", "8", 7 / 9),
        ("1-10", "8\n\n---", "8", 7 / 9),
        ("1-10", "8\n===", "8", 7 / 9),
        ("1-10", "8\u200b", "8", 7 / 9),
        ("-1 to 1", "**\u22121**", "-1", 0.0),
        ("\u22121 to 1", "Score: \u22120.5\u200b", "-0.5", 0.25),
        ("yes/no", "**Verdict**: yes", "yes", 1.0),
        ("A/B", "**Winner**: A", "a", 1.0),
        ("partly **right**/wrong", "`partly` right", "partly right", 1.0),
        ("+/-", "Because.\n-", "-", 0.0),
        ("+/-", "**-**\n\n---", "-", 0.0),
        ("++/+/-/--", "Verdict: --", "--", 0.0),
        ("++/+/-/--", "+\n--", "--", 0.0),
        ("1-10", "<think> 3 </think> 8", "8", 7 / 9),  # of a judge that gives its thinking apart
        ("yes/no", "<think>\nno\n</think>\n\nIt is.\nYes.", "yes", 1.0),
        ("yes/no", "yes </think> the response ends with </think> no", "no", 0.0),
    ],
)
def test_the_last_line_is_the_score(of, reply, text, reward):
    found = scale(of).score_of(reply)
    assert (found.text, found.reward) == (text, pytest.approx(reward))


@pytest.mark.parametrize(
    ("of", "reply", "kind"),
    [
        ("1-10", "", "no_score"),
        ("1-10", " \n ", "no_score"),
        ("1-10", "8\nThat is my score.", "no_score"),
        ("1-10", "Between 7 and 8", "no_score"),
        ("1-10", "7-8", "no_score"),
        ("1-10", "8/100", "no_score"),  # of another scale
        ("1-10", "nan", "no_score"),
        ("1-10", "1e1", "no_score"),
        ("0-10", "...5", "no_score"),
        ("0-10", ",5", "no_score"),  # half, for some
        ("-1 to 1", "- 1", "no_score"),  # one, or minus one
        ("-1=0, 0=0.5, 1=1", "- 1", "no_score"),
        ("-.5=0, .5=1", "- .5", "no_score"),
        ("0=0, .5=0.5, 1=1", "5", "no_score"),
        ("1-10", "-1", "out_of_scale"),
        ("1-10", "11", "out_of_scale"),
        ("1-10", "0.99", "out_of_scale"),
        ("5-1", "6", "out_of_scale"),
        ("yes/no", "maybe", "no_score"),
        ("yes/no", "yes and no", "no_score"),
        ("safe/unsafe", "not safe", "no_score"),
        ("1-100", "2*5", "no_score"),
        ("1-10", "---\n***", "no_score"),
        ("1-10", "<think> it may be\n8", "no_score"),
        ("1-10", "8 </think>\n", "no_score"),
    ],
)
def test_another_last_line_is_no_score(of, reply, kind):
    with pytest.raises(NoScore) as raised:
        scale(of).score_of(reply)
    assert raised.value.kind == kind


@given(st.integers(-20, 20), st.integers(-20, 20), st.floats(0, 1))
def test_a_range_is_linear_from_worst_to_best(first, last, share):
    if first == last:
        return
    value = first + share * (last - first)
    reward = (
        scale(f"{first} to {last}").score_of(f"{value:.3f}").reward
        if min(first, last) < value < max(first, last)
        else share
    )
    assert 0 <= reward <= 1
    assert reward == pytest.approx(share, abs=1e-3)


def test_a_file_is_its_scale_and_a_prompt(tmp_path):
    path = write_rubric(tmp_path)
    rubric = read_rubric(str(path))
    assert (rubric.scale.text, rubric.scale.bounds) == ("1-10", (1.0, 10.0))
    assert rubric.prompt.startswith("How good is this response?")
    assert rubric.facts == {
        "name": str(path),
        "text": RUBRIC,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    fenced = read_rubric(str(write_rubric(tmp_path, "---\nscale: yes/no\n---\n\nNote: is it right?\n{response}")))
    assert (fenced.scale.words, fenced.prompt) == ({"yes": 1.0, "no": 0.0}, "Note: is it right?\n{response}")


def test_what_a_response_says_is_no_placeholder(tmp_path):
    text = "scale: yes/no\nQ {question} R {response} T {ground_truth} {reference} {other} \\frac{a}{b}"
    rubric = read_rubric(str(write_rubric(tmp_path, text)))
    values = {"question": "{response}", "response": "{ground_truth}", "ground_truth": None, "reference": "7"}
    assert rubric.fill(values) == "Q {response} R {ground_truth} T (none) 7 {other} \\frac{a}{b}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("How good?\n{response}", "does not begin with its scale"),
        ("---\nscale: 1-10\ntemperature: 0\n---\n{response}", "begins with temperature"),
        ("scale: 1-10\nHow good?", "does not show the judge {response}"),
        ("scale: 1-10\n{respnse}", "has {respnse}"),
        ("scale: 3-3\n{response}", "has one score"),
        ("scale: 0/1\n{response}", "does not say which number is the best"),
        ("scale: yes\n{response}", "which is none"),
        ("scale: yes/yes\n{response}", "which is none"),
        ("scale: C/C#\n{response}", "which is none"),  # in a reply, the mark is left out
        ("scale: yes/**\n{response}", "which is none"),
        ("scale: yes=1, no\n{response}", "which is none"),
        ("scale: yes=2, no=0\n{response}", "not from 0 to 1"),
        ("scale: yes=nan, no=0\n{response}", "not from 0 to 1"),
    ],
)
def test_a_rubric_that_would_not_work_is_refused(tmp_path, text, problem):
    with pytest.raises(RlvrError) as raised:
        read_rubric(str(write_rubric(tmp_path, text)))
    assert problem in raised.value.problem
    assert raised.value.hint


def test_a_rubric_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(RlvrError, match=r"Cannot read .*none\.md: No such file"):
        read_rubric(str(tmp_path / "none.md"))
    (tmp_path / "latin.md").write_bytes(b"scale: yes/no\n\xff{response}")
    with pytest.raises(RlvrError, match="not UTF-8"):
        read_rubric(str(tmp_path / "latin.md"))


@pytest.mark.parametrize(
    ("of", "rewards"),
    [
        ("A/B", {"a": 1.0, "b": 0.0}),
        ("[[A]]/[[B]]/[[C]]", {"a": 1.0, "b": 0.0, "c": 0.5}),
        ("first, second, tie", {"first": 1.0, "second": 0.0, "tie": 0.5}),
        ("A=0, B=1", {"a": 0.0, "b": 1.0}),
        ("tie=0.5, A=1, B=0", {"tie": 0.5, "a": 1.0, "b": 0.0}),
        ("A=1, B=0, tie=0.3", None),
        ("A=0.9, B=0.1", None),
        ("A=1, B=1", None),
        ("A=1, B=0, tie=0.5, none=0.5", None),
        ("A/tie/B", None),
        ("Tie/A/B", None),
        ("A/Draw/B", None),
        ("neither, A, B", None),
        ("A/both", None),
        ("A/equally good/B", None),
        ("first/second/equal", {"first": 1.0, "second": 0.0, "equal": 0.5}),
        ("A/B/C/D", None),
        ("1-10", None),
    ],
)
def test_the_rewards_of_a_pair_are_by_place_or_as_the_rubric_says(tmp_path, of, rewards):
    path = str(write_rubric(tmp_path, f"scale: {of}\n{{response_a}}{{response_b}}"))
    if rewards is not None:
        assert read_rubric(path, placeholders=PAIRWISE).scale.words == rewards
        return
    with pytest.raises(RlvrError, match="does not say which is better") as raised:
        read_rubric(path, placeholders=PAIRWISE)
    assert "scale: A/B/tie" in raised.value.hint


def test_a_rubric_of_pairs_shows_both_responses(tmp_path):
    with pytest.raises(RlvrError, match=r"does not show the judge \{response_b\}"):
        read_rubric(str(write_rubric(tmp_path, "scale: A/B/tie\n{response_a}")), placeholders=PAIRWISE)
