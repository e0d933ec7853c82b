"""pass@k, best@k and majority@k: their intervals, and that all commands have the same ones."""

import math
import random

import pytest

from factories import a_rollout
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.analysis.statistics.at_k import Question, at_k, at_k_table, questions_of_runs
from rlvr_cli.analysis.statistics.estimators import majority_at_k, mean_of, share_interval, share_of
from rlvr_cli.analysis.summary import summarize
from rlvr_cli.graders.answers.equivalence import equivalent
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir


def sample(question, number, reward, *, answer="8", logprob=-1.0):
    return a_rollout(
        run_id="r", example_id=question, sample_index=number, answer_reward=reward, reward=reward, extracted_answer=answer,
        category=f"format_1_answer_{int(reward > 0.5)}", failure_kind=None if reward > 0.5 else "wrong_answer", mean_logprob=logprob,
    )  # fmt: skip


@pytest.fixture
def table(tmp_path):
    """The rows of at_k for a run of these samples, as dicts."""

    def call(rows, **parameters):
        if not (tmp_path / "r").exists():
            with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
                run.commit_rollouts("eval", 0, rows)
        query = named_queries()["at_k"]
        with open_runs([read_run(tmp_path / "r")]) as database:
            return list(at_k_table(database, {**query.parameters, **parameters})[0].records())

    return call


def random_samples():
    rng = random.Random(3)
    return [
        sample(f"q{q}", i, float(rng.random() < q / 24), answer=str(rng.randrange(3)), logprob=round(-rng.random(), 1))
        for q in range(25)
        for i in range(8)
    ]


def test_two_questions_by_hand(table):
    """x: right, wrong 5, wrong 5; y: always right. The likeliest sample of x is right."""
    rows = [
        sample("x", 0, 1.0, answer="7", logprob=-0.1),
        sample("x", 1, 0.0, answer="5"),
        sample("x", 2, 0.0, answer="5"),
    ]
    rows += [sample("y", i, 1.0, answer="7") for i in range(3)]
    first, second, third = table(rows)
    assert [r["k"] for r in (first, second, third)] == [1, 2, 3]
    assert (first["pass_at_k"], first["best_at_k"], first["majority_at_k"]) == pytest.approx((2 / 3, 2 / 3, 2 / 3))
    assert (second["pass_at_k"], second["best_at_k"]) == pytest.approx(((2 / 3 + 1) / 2, (2 / 3 + 1) / 2))
    # Of two samples of x: {right, 5} twice, each a tie; {5, 5} once.
    assert second["majority_at_k"] == pytest.approx((1 / 3 + 1) / 2)
    assert (third["pass_at_k"], third["best_at_k"], third["majority_at_k"]) == pytest.approx((1, 1, 1 / 2))


def test_all_right_is_as_certain_as_so_many_questions(table):
    """At k = n every question gives 1: the interval is that of 20 questions, not of zero width."""
    rows = [
        sample(f"q{q}", i, float(i == 0), answer="7" if i == 0 else "5", logprob=-0.1 - i)
        for q in range(20)
        for i in range(16)
    ]
    last = table(rows)[-1]
    for name in ("pass_at_k", "best_at_k"):
        assert (last[name], last[f"{name}_low"], last[f"{name}_high"]) == (1.0, *share_interval(1.0, 20))
    assert (last["majority_at_k_low"], last["majority_at_k_high"]) == share_interval(0.0, 20)


def test_rounding_makes_no_question_rare(table):
    """Of 16 right samples the best of 8 is right with a probability of 0.9999999999999998."""
    rows = [sample(f"q{q}", i, 1.0, answer="7", logprob=-0.1 - i) for q in range(20) for i in range(16)]
    for found in table(rows):
        for name in ("pass_at_k", "best_at_k", "majority_at_k"):
            assert (found[f"{name}_low"], found[f"{name}_high"]) == share_interval(1.0, 20), found["k"]


def test_the_interval_is_over_questions(table):
    rows = random_samples()
    votes = {f"q{q}": [r for r in rows if r.example_id == f"q{q}"] for q in range(25)}
    for found in table(rows):
        values = []
        for of in votes.values():
            right = sum(r.reward > 0.5 for r in of)
            wrong = [sum(r.reward <= 0.5 and r.extracted_answer == str(a) for r in of) for a in range(3)]
            values.append(majority_at_k(right, [w for w in wrong if w], found["k"]))
        expected = share_of([(round(v, 12), 1, 1) for v in values], draws=200 / found["k"])
        got = [found[f"majority_at_k{end}"] for end in ("", "_low", "_high")]
        assert got == pytest.approx([expected.value, expected.low, expected.high])


def test_every_command_has_the_same_numbers(table, tmp_path):
    """pass_at_k and best_at_k are SQL, at_k and the summary are Python."""
    rows = table(random_samples())
    with open_runs([read_run(tmp_path / "r")]) as database:
        for name in ("pass_at_k", "best_at_k"):
            query = named_queries()[name]
            alone = list(database.select(query.sql, query.parameters).records())
            for ours, theirs in zip(rows, alone, strict=True):
                mine = [ours[f"{name}{end}"] for end in ("", "_low", "_high")]
                assert mine == pytest.approx([theirs[name], theirs["low"], theirs["high"]])
    for ours, at in zip(rows, summarize(tmp_path / "r").at_k, strict=True):
        for name in ("pass_at_k", "best_at_k", "majority_at_k"):
            estimate = getattr(at, name)
            assert (ours[name], ours[f"{name}_low"], ours[f"{name}_high"]) == (
                estimate.value,
                estimate.low,
                estimate.high,
            )


def test_samples_without_an_answer_have_no_vote(table):
    rows = [
        sample("x", 0, 1.0, answer="7"),
        *(sample("x", i, 0.0, answer=answer) for i, answer in ((1, None), (2, " "))),
    ]
    assert table(rows)[-1]["majority_at_k"] == 1.0


def test_wrong_answers_that_differ_in_their_spelling_are_one_vote(table):
    """2 of 7 samples are right; of 5 wrong ones 3 are a half and 2 are -1234, so that the half wins. Apart, 2 votes would do."""
    right = [sample("x", i, 1.0, answer=answer) for i, answer in enumerate(["7", "7.0"])]
    spellings = ["1/2", r"$\dfrac{1}{2}$", "0.50", "-1,234", r"\text{-1234}."]
    wrong = [sample("x", 2 + i, 0.0, answer=answer) for i, answer in enumerate(spellings)]
    assert table([*right, *wrong])[-1]["majority_at_k"] == 0.0


def votes(tmp_path, answers):
    """The votes for each of these wrong answers, as at_k counts them."""
    with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
        run.commit_rollouts("eval", 0, [sample("x", i, 0.0, answer=answer) for i, answer in enumerate(answers)])
    with open_runs([read_run(tmp_path / "r")]) as database:
        _, _, questions = next(questions_of_runs(database, named_queries()["at_k"].parameters))
        return list(next(questions).wrong)


@pytest.mark.parametrize(
    "spellings",
    [
        ["1/2", "0.5", ".50", " 1 / 2 ", "2/4.", r"\frac{1}{2}", r"\(\tfrac12\)", r"\boxed{\frac12}", "$+0.5$"],
        ["-1/2", "-0.5", r"-\frac{1}{2}", r"\frac{-1}{2}", r"$-\dfrac{1}{2}$"],
        ["1234567", "1,234,567.0", "1{,}234{,}567", r"1,\!234,\! 567", r"\$1\,234\,567", r"\text{1234567}"],
        ["-1234", "- 1,234", r"$ -1,\,234 $.", "-1{,}234.0"],
        ["10, 100", r"10,\;100.", "$10 , 100$"],
        ["2 1/2", r"2\,1/2", r"2\; 1/2"],
        [r"x\,y", "x y", r"x\!\,y"],
        ["0", "-0", "+0.0", "0/7", "00"],
        ["Paris", "paris.", r"\textbf{PARIS}", r"$\mathrm{ Paris }$"],
        ["Yes", "yes", "YES."],
        ["x^2 + 1", "x^2+1", "$x^2 + 1$", r"\[ x^2 + 1 \]"],
        ["(1, 2)", "(1,2)", r"\left(1, 2\right)", r"\left( 1,\;2 \right)."],
        [r"\frac{a}{b}", r"\dfrac{a}{b}"],
    ],
    ids=lambda spellings: spellings[0],
)
def test_spellings_of_one_answer(tmp_path, spellings):
    assert votes(tmp_path, spellings) == [len(spellings)]
    assert all(equivalent(spelled, spellings[0]) for spelled in spellings), "as the graders judge"


@pytest.mark.parametrize(
    ("answer", "other"),
    [
        ("10, 100", "10100"),
        ("1, 234", "1234"),
        ("1 , 234", "1234"),
        (r"1,\;234", "1234"),
        (r"2\,1/2", "21/2"),
        (r"1\,2\,3", "123"),
        (r"5\:6", "56"),
        (r"12\!3", "123"),
        ("9007199254740993", "9007199254740992"),
        ("2  1/2", "21/2"),
    ],
)
def test_answers_that_graders_tell_apart(tmp_path, answer, other):
    assert not equivalent(answer, other)
    assert votes(tmp_path, [answer, other]) == [1, 1]


def test_answers_that_differ(tmp_path):
    different = [
        "1/3",
        "0.33",
        "21/2",
        "2 1/2",
        "12,34",
        "1234",
        "1 2 3",
        "123",
        "AB",
        "ab",
        "x",
        "X",
        "1/0",
        "2/0",
        "1.2.3",
    ]
    different += [
        "123456789012345678",
        "123456789012345679",
        "->",
        r"\leftarrow",
        r"\leftarrow b",
        "5 cm",
        "-5",
        "5",
        "1e400",
    ]
    assert votes(tmp_path, different) == [1] * len(different)


@pytest.mark.parametrize("nothing", ["", " ", "\n", "$$", r"\(\)", "."])
def test_what_only_typesets_is_no_vote(tmp_path, nothing):
    assert votes(tmp_path, [nothing, "5"]) == [1]


def test_few_samples_at_a_time_give_the_same(table, monkeypatch):
    """There are 8 samples of each question."""
    rows = table(random_samples())
    for held in (1, 3):
        monkeypatch.setattr("rlvr_cli.analysis.statistics.at_k.SAMPLES_AT_ONCE", held)
        for ours, expected in zip(table([]), rows, strict=True):
            assert (ours.pop("run_id"), ours["k"]) == ("r", expected["k"])
            assert ours == pytest.approx({name: expected[name] for name in ours}, rel=1e-14)


@pytest.mark.parametrize(
    ("k", "expected"),
    [(4, [4]), ("1,2,8", [1, 2, 8]), ([2, 4], [2, 4]), ("16", []), ("4,99", [4]), ([4, 4], [4]), (3, [3])],
)
def test_the_ks_that_are_asked_for(table, k, expected):
    rows = table(random_samples(), k=k)
    assert [row["k"] for row in rows] == expected
    assert all(row["questions"] == 25 for row in rows)


@pytest.mark.parametrize("missing", [None, math.nan])
def test_without_log_probabilities_there_is_no_best(table, missing):
    (_, last) = table([sample("x", 0, 1.0, logprob=missing), sample("x", 1, 0.0)])
    assert (last["best_at_k"], last["best_at_k_low"]) == (None, None)
    assert last["pass_at_k"] == 1.0


def test_without_answers_there_is_no_majority(table, tmp_path):
    """Such as of episodes whose environment gives the rewards, or of a grader that tells no answers."""
    right = [sample(q, i, float(i < 3), answer=answer) for q, answer in (("x", None), ("y", " ")) for i in range(4)]
    for row in table(right):
        assert (row["majority_at_k"], row["majority_at_k_low"], row["majority_at_k_high"]) == (None, None, None)
    assert row["pass_at_k"] == 1.0
    (at_k,) = [t for t in summarize(tmp_path / "r").tables() if t.title == "at_k"]
    assert [row[-1] for row in at_k.rows] == [None, None, None]


def test_questions_with_fewer_samples_count_where_they_have_enough():
    """Of the first batch k = 3 is the largest number of samples, which is no power of 2: then one has 5."""
    right = [Question(rewards=(1.0,) * n, correct=n, wrong=()) for n in (3, 2, 5, 1)]
    found, most = at_k(right)
    assert most == 5
    assert [(at.k, at.questions, at.pass_at_k.value) for at in found] == [
        (1, 4, 1.0),
        (2, 3, 1.0),
        (4, 1, 1.0),
        (5, 1, 1.0),
    ]


def test_rewards_that_are_no_shares_have_students_interval():
    good, bad = Question(rewards=(3.0, 1.0), correct=2, wrong=()), Question(rewards=(-1.0, -1.0), correct=0, wrong=(2,))
    ((at,), _) = at_k([good, bad, good], [2])
    best = at.best_at_k
    assert best == mean_of([(3.0, 1, 2), (-1.0, 1, 1)])
    assert best.interval == "t by question"
