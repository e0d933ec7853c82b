"""What another objective changes, in words."""

from rlvr_cli.analysis.statistics.objective import objective_sentences
from rlvr_cli.types import Table

COLUMNS = (
    *("run_id", "kind", "bucket", "responses", "tokens", "token_weight", "other_token_weight"),
    *("push_share", "other_push_share"),
)


def sentences(*rows):
    return list(objective_sentences(Table(COLUMNS, list(rows))))


def test_who_gains_and_who_loses():
    assert sentences(
        ("r", "correctness", "wrong", 5, 7.0, -0.3, -0.02, 0.5, 0.24),
        ("r", "correctness", "correct", 9, 28.4, 0.1, 0.02, 0.5, 0.76),
        ("r", "length", "wrong, shortest quarter", 4, 5.2, -0.2, -0.02, 0.44, 0.14),
        ("r", "length", "correct, longest quarter", 4, 40.0, 0.2, 0.02, 0.1, 0.3),
    ) == [
        "r: correct responses (28 tokens on average) would get 76% of the push instead of 50%; "
        "wrong, shortest quarter (5 tokens on average) would get 14% of the push instead of 44%.",
        "r: a token of a wrong response is pushed down 3 times as hard as one of a right response is pushed up; "
        "with the other objective 1 times.",
    ]


def test_an_objective_that_changes_nothing_or_pushes_nothing():
    same = ("correctness", "wrong", 5, 7.0, -0.3, -0.02, 0.5, 0.502)
    assert "the same share of the push" in sentences(("r", *same))[0]
    assert sentences(("r", *same[:-1], None)) == ["r: the other objective pushes no response at all."]
    assert sentences(("r", *same[:-2], None, 0.5)) == []  # the run itself pushed none
    assert sentences(("r", "response", *same[1:])) == []
    assert [text[:2] for text in sentences(("a", *same), ("b", *same))] == ["a:", "b:"]
