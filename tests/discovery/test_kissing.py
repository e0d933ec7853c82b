"""The verifier against hand-worked sets, an oracle that shares nothing with it, and numbers around every width of a machine's integers."""

import itertools
import json
import math
import random
import re
from collections.abc import Iterator

import numpy as np
import pytest

from kissing_sets import Points, axes, laminated_582, large_coordinates, overflow_exploit, rational_600, roots
from rlvr_cli.discovery import kissing
from rlvr_cli.discovery.kissing import MAX_BITS, UPPER_BOUNDS, Verdict, verify

HEXAGON = [[1, 0, -1], [1, -1, 0], [0, -1, 1], [-1, 0, 1], [-1, 1, 0], [0, 1, -1]]


def oracle(points: Points) -> tuple[bool, str]:
    """Whether a set of vectors is valid, and the message if not: differences, squared and summed as Python's ints."""
    norms = [sum(x**2 for x in p) for p in points]
    if 0 in norms:
        return False, f"vector {norms.index(0)} is the zero vector"
    pairs = itertools.combinations(range(len(points)), 2)
    least, i, j = min((sum((a - b) ** 2 for a, b in zip(points[i], points[j], strict=True)), i, j) for i, j in pairs)
    if least == 0:
        return False, f"vectors {i} and {j} are equal"
    if least < max(norms):
        return False, f"Minimum squared distance {least} < maximum squared norm {max(norms)} (vectors {i} and {j})"
    return True, ""


def assert_matches_oracle(points: Points) -> bool:
    verdict, (valid, error) = verify(points, dim=len(points[0])), oracle(points)
    if len(points) > UPPER_BOUNDS[len(points[0]) - 1]:
        assert not valid  # the bounds are proved
        assert verdict.validity == 0.0
        return False
    assert (verdict.validity, verdict.error) == (float(valid), error), points
    assert verdict.category == ("valid" if valid else "invalid_condition")
    assert verdict.num_points == len(points)
    return valid


# Hand-worked


def test_known_configurations_are_valid():
    assert verify(axes(), dim=11) == Verdict(22, 11, 1.0, "", "valid", 8, 4)
    assert verify(roots(), dim=11) == Verdict(220, 11, 1.0, "", "valid", 2, 2)
    assert verify(laminated_582(), dim=11) == Verdict(582, 11, 1.0, "", "valid", 4, 4)
    assert verify(rational_600(), dim=11) == Verdict(600, 11, 1.0, "", "valid", 4 * 10**10, 4 * 10**10)
    assert verify(rational_600()[:592], dim=11).validity == 1.0
    assert verify(HEXAGON, dim=3) == Verdict(6, 3, 1.0, "", "valid", 2, 2)
    assert verify([[-1], [1]], dim=1) == Verdict(2, 1, 1.0, "", "valid", 4, 1)
    assert verify(roots(24), dim=24).num_points == 1104
    assert verify(roots(24), dim=24).validity == 1.0
    assert verify(roots(40), dim=40).validity == 1.0  # beyond the table of bounds


@pytest.mark.parametrize(
    ("points", "category", "error"),
    [
        ([[3, 4], [3, -2]], "valid", ""),
        ([[3, 4], [-3, 4], [0, 9]], "invalid_condition", "Minimum squared distance 34 < maximum squared norm 81 (vectors 0 and 2)"),
        ([[6, 2], [2, 2], [6, -2]], "invalid_condition", "Minimum squared distance 16 < maximum squared norm 40 (vectors 0 and 1)"),
        ([[1, 0], [0, 1], [1, 0]], "invalid_condition", "vectors 0 and 2 are equal"),
        ([[1, 0], [0, 0], [1, 0]], "invalid_condition", "vector 1 is the zero vector"),
        ([], "bad_points", "the list has 0 vectors: at least 2 are needed"),
        ([[1, 0]], "bad_points", "the list has 1 vectors: at least 2 are needed"),
        (None, "bad_points", "the answer is not a list of vectors (NoneType)"),
        ("[[1, 0], [0, 1]]", "bad_points", "the answer is not a list of vectors (str)"),
        ({"a": 1}, "bad_points", "the answer is not a list of vectors (dict)"),
        (([1, 0], [0, 1]), "bad_points", "the answer is not a list of vectors (tuple)"),
        (np.eye(2, dtype=int), "bad_points", "the answer is not a list of vectors (ndarray)"),
        ([[1, 0], (0, 1)], "bad_points", "vector 1 is not a list (tuple)"),
        ([[1, 0], 7], "bad_points", "vector 1 is not a list (int)"),
        ([[1, 0], [0, 1, 0]], "bad_points", "vector 1 has 3 entries, not 2"),
        ([[1, 0], []], "bad_points", "vector 1 has 0 entries, not 2"),
        ([[1, 0], [0, 1.0]], "bad_points", "vector 1 has a non-integer entry (float)"),
        ([[1, 0], [0, float("nan")]], "bad_points", "vector 1 has a non-integer entry (float)"),
        ([[1, 0], [0, True]], "bad_points", "vector 1 has a non-integer entry (bool)"),
        ([[1, 0], [0, "1"]], "bad_points", "vector 1 has a non-integer entry (str)"),
        ([[1, 0], [0, None]], "bad_points", "vector 1 has a non-integer entry (NoneType)"),
        ([[1, 0], [0, np.int64(1)]], "bad_points", "vector 1 has a non-integer entry (int64)"),
        ([[1, 0], [0, 1 << MAX_BITS]], "bad_points", "vector 1 has an entry of 513 bits; the limit is 512"),
        ([[1, 0], [0, -(1 << MAX_BITS)]], "bad_points", "vector 1 has an entry of 513 bits; the limit is 512"),
    ],
)  # fmt: skip
def test_each_refusal_names_its_witness(points, category, error):
    verdict = verify(points, dim=2)
    assert (verdict.category, verdict.error) == (category, error)
    assert verdict.validity == float(category == "valid")


def test_entries_of_the_largest_size_are_computed():
    largest = (1 << MAX_BITS) - 1
    assert verify([[largest, 0], [-largest, 0]], dim=2) == Verdict(2, 2, 1.0, "", "valid", 4 * largest**2, largest**2)
    assert verify([[largest, 0], [1, largest]], dim=2).validity == 1.0
    assert verify([[largest, 1], [1, largest]], dim=2).validity == 1.0
    assert verify([[largest, 1], [largest, 0]], dim=2).min_squared_distance == 1


def test_the_dimension_is_checked():
    """A famous set in another dimension, which the course's evaluator accepts."""
    assert verify(roots(24), dim=11).error == "vector 0 has 24 entries, not 11"


# Against the oracle


def random_sets(seed: int, number: int) -> Iterator[Points]:
    """Sets of all sizes of entries: some valid by their making, some by chance, most not."""
    draw = random.Random(seed)
    edges = [0, 1, 2**26, 2**31, 2**32, 2**53, 2**63, 2**64, 2**200]
    for _ in range(number):
        dim, count = draw.randint(1, 12), draw.randint(2, 9)
        size = draw.choice([1, 2, 3, 10, 2 ** draw.randint(1, 70)])
        match draw.randrange(4):
            case 0:  # of one size
                yield [[draw.randint(-size, size) for _ in range(dim)] for _ in range(count)]
            case 1:  # beside the edges of the machine's integers
                yield [
                    [draw.choice((1, -1)) * draw.choice(edges) + draw.randint(-1, 1) for _ in range(dim)]
                    for _ in range(count)
                ]
            case 2:  # a part of a valid set, scaled, with an entry changed by little or not at all
                points = [[size * x for x in row] for row in draw.sample(roots(12), count)]
                points[0][draw.randrange(12)] += draw.choice((0, 0, 1, -1))
                yield points
            case _:  # sums of squares around 2^53 and 2^63, where the arithmetic changes
                edge = draw.choice((53, 63))
                around = int(((1 << edge) / (4 * dim)) ** 0.5)
                yield [
                    [draw.choice((1, -1)) * (around + draw.randint(-2, 2)) for _ in range(dim)] for _ in range(count)
                ]


def test_random_sets_match_the_oracle():
    valid = sum(map(assert_matches_oracle, random_sets(0, 400)))
    assert 50 < valid < 350  # both verdicts are tried


@pytest.mark.parametrize("base", [2**15, 2**16, 2**26, 2**31, 2**32, 2**43, 2**53, 2**63, 2**64])
@pytest.mark.parametrize("step", [-1, 0, 1])
def test_nothing_wraps_beside_a_power_of_two(base, step):
    """Sets that are valid by one unit, equal or invalid by one unit, with entries around `base`."""
    m = base + step
    for shift in (-1, 0, 1):
        assert_matches_oracle([[m, 0, 0], [m + shift, m, 0]])
        assert_matches_oracle([[m, 0, 0], [0, m + shift, 0], [-m, 0, 0], [0, 0, m]])
        assert_matches_oracle([[m, m + shift, 0], [m, 0, m], [0, m, m], [m, -m, 0]])
        assert_matches_oracle([[m * x + shift * (i == 0) for x in row] for i, row in enumerate(HEXAGON)])
    assert_matches_oracle([[m, 0], [2 * m, 0], [0, m]])
    height = math.isqrt(3 * m * m)  # of a triangle with sides 2m, below its true height by less than 1
    assert not assert_matches_oracle([[2 * m, 0], [m, height]])
    assert assert_matches_oracle([[2 * m, 0], [m, height + 1]])
    assert_matches_oracle([[m], [-m]])


@pytest.mark.parametrize("bits", [53, 63])
def test_the_arithmetic_changes_where_the_proof_says(bits, monkeypatch):
    """The largest entries with 4 d m^2 < 2^bits, and the next ones."""
    m = next(m for m in itertools.count(int(((1 << bits) / 12) ** 0.5) + 2, -1) if 12 * m * m < 1 << bits)
    used = []
    monkeypatch.setattr(
        kissing,
        "_python_distances",
        lambda rows, f=kissing._python_distances, **given: used.append("int") or f(rows, **given),
    )
    monkeypatch.setattr(
        kissing, "_machine_distances", lambda p, f=kissing._machine_distances: used.append(str(p.dtype)) or f(p)
    )
    for size in (m, m + 1):
        assert_matches_oracle([[size, -size, size], [-size, size, -size], [size, size, -size]])
    assert used == {53: ["float64", "int64"], 63: ["int64", "int"]}[bits]


def test_the_exploit_that_wraps_is_refused():
    points = overflow_exploit()
    wrapped = np.array([[(x + 2**63) % 2**64 - 2**63 for x in row] for row in points], np.int64)
    gram = wrapped @ wrapped.T
    norms = np.diag(gram)
    distances = norms[:, None] + norms[None, :] - 2 * gram
    np.fill_diagonal(distances, np.iinfo(np.int64).max)
    assert distances.min() >= norms.max() > 0  # 64 bits accept it: 1,000 vectors, more than there can be
    verdict = verify(points, dim=11)
    assert verdict.category == "invalid_condition"
    assert "looked at the first 869 of 1000 vectors" in verdict.error
    assert_matches_oracle(points[:60])


def test_large_sets_are_decided_by_one_unit():
    """Of the kind of the published 593: a unit is 1e-13 of a norm, which every usual tolerance of floats forgives."""
    points = large_coordinates()
    assert verify(points, dim=11) == Verdict(582, 11, 1.0, "", "valid", 10**26, 10**26)
    draw, forgiven = random.Random(1), 0
    for _ in range(4):
        i, k = draw.randrange(22, 582), draw.randrange(11)
        for step in (1, -1):
            points[i][k] += step
            valid = changed_is_valid(points, i, 10**26)
            assert verify(points, dim=11).validity == float(valid), (i, k, step)
            array = np.array(points, float)
            gram = array @ array.T
            distances = np.diag(gram)[:, None] + np.diag(gram)[None, :] - 2 * gram + 1e30 * np.eye(582)
            forgiven += not valid and distances.min() >= np.diag(gram).max() * (1 - 1e-9)
            points[i][k] -= step
    assert forgiven


def changed_is_valid(points: Points, i: int, condition: int) -> bool:
    """Whether a set of equal norms, valid before vector i was changed, still is: only this vector's numbers are computed."""
    largest = max(condition, sum(x * x for x in points[i]))
    least = min(sum((a - b) ** 2 for a, b in zip(points[i], p, strict=True)) for j, p in enumerate(points) if j != i)
    return min(least, condition) >= largest and any(points[i])


@pytest.mark.parametrize("every", [1999, pytest.param(1, marks=pytest.mark.full)])
def test_each_change_of_an_entry_of_the_600_is_decided_exactly(every):
    points = rational_600()
    norms = [sum(x * x for x in p) for p in points]
    changes = list(itertools.product(range(600), range(11), (1, -1)))[::every]
    valid = 0
    distances = {
        i: [sum((a - b) ** 2 for a, b in zip(points[i], q, strict=True)) for q in points] for i, _, _ in changes
    }
    for i, k, step in changes:
        p, norm = points[i], norms[i]
        new_norm = norm + 2 * step * p[k] + 1
        largest = max(new_norm, max(n for j, n in enumerate(norms) if j != i))
        own = min(distances[i][j] + 2 * step * (p[k] - q[k]) + 1 for j, q in enumerate(points) if j != i)
        others = 4 * 10**10  # attained by pairs without vector i, too
        p[k] += step
        assert verify(points, dim=11).validity == float(min(own, others) >= largest), (i, k, step)
        p[k] -= step
        valid += min(own, others) >= largest
    assert 0 < valid < len(changes)


# Time


def test_only_as_many_vectors_are_looked_at_as_a_valid_set_can_have():
    """The rest may be anything: a set with more vectors than the bound is invalid by what its beginning shows."""
    points: list[object] = [*rational_600(), *rational_600()[:269], *["no vector"] * 1_000_000]
    verdict = verify(points, dim=11)
    assert verdict.num_points == 1_000_869
    assert verdict.error == "vectors 0 and 600 are equal"


def test_the_verdict_does_not_rest_on_the_table_of_bounds(monkeypatch):
    monkeypatch.setattr(kissing, "UPPER_BOUNDS", (2,) * 24)
    assert verify(laminated_582(), dim=11).validity == 1.0
    changed = laminated_582()
    changed[-1][0] += 1
    assert verify(changed, dim=11).validity == 0.0
    assert verify([*laminated_582(), [0.5] * 11], dim=11).error == "vector 582 has a non-integer entry (float)"


def test_the_distances_of_a_large_set_are_computed_in_blocks(monkeypatch):
    points = laminated_582()[-50:]
    points[-1], points[-2] = [1] * 4 + [0] * 7, [1] * 4 + [0] * 6 + [1]
    expected = oracle(points)[1]
    for block in (7, 50):
        monkeypatch.setattr(kissing, "_BLOCK", block)
        assert verify(points, dim=11).error == expected


@pytest.mark.parametrize("bits", [40, 500])
def test_pairs_that_floats_cannot_tell_apart_are_compared_exactly(bits):
    """Distances that differ in their last unit, far below what float64 holds; the nearest pair is anywhere among them."""
    draw = random.Random(bits)
    for _ in range(5):
        size = (1 << bits) + draw.randint(0, 1 << (bits - 1))
        points = [[size * x for x in row] for row in draw.sample(laminated_582(), 60)]
        for _ in range(5):
            points[draw.randrange(60)][draw.randrange(11)] += draw.choice((-1, 1))
        verdict = verify(points, dim=11)
        assert verdict.error == oracle(points)[1]
        assert verdict.min_squared_distance == min(
            sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) for p, q in itertools.combinations(points, 2)
        )


@pytest.mark.parametrize("places", [1, 2, 3])
@pytest.mark.parametrize("outlier", [False, True])
@pytest.mark.parametrize("spread", [1, 60, 500])
def test_sets_in_a_few_places_far_apart_match_the_oracle(places, outlier, spread):
    """Within a place, distances are 2^-1000 to 2^-20 of those to 0 and to the others; one vector may be the largest of all."""
    draw = random.Random(f"{places} {outlier} {spread}")
    for _ in range(7):
        where = [[draw.randint(-(1 << 510), 1 << 510) for _ in range(3)] for _ in range(places)]
        points = [
            [x + draw.randint(-(1 << spread), 1 << spread) for x in where[i % places]] for i in range(UPPER_BOUNDS[2])
        ]
        if outlier:
            points[draw.randrange(len(points))] = [(1 << 512) - 1] * 3
        if draw.random() < 0.2:
            points[3] = list(points[-1])
        assert_matches_oracle(points)
        verdict = verify(points, dim=3)
        assert verdict.min_squared_distance == min(
            sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) for p, q in itertools.combinations(points, 2)
        )


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 8, 24])
def test_the_bounds_are_the_kissing_numbers_where_these_are_known(dim):
    assert UPPER_BOUNDS[dim - 1] == {1: 2, 2: 6, 3: 12, 4: 24, 8: 240, 24: 196560}[dim]
    assert list(UPPER_BOUNDS) == sorted(UPPER_BOUNDS)


def test_the_witness_of_a_long_list_is_true():
    points = overflow_exploit()
    least, most, i, j = map(int, re.findall(r"\d+", verify(points, dim=11).error)[:4])
    assert sum((a - b) ** 2 for a, b in zip(points[i], points[j], strict=True)) == least < most
    assert most == max(sum(x * x for x in p) for p in points[:869])


def test_a_verdict_can_be_written_as_json():
    found = json.loads(json.dumps(vars(verify(large_coordinates(), dim=11))))
    assert found["max_squared_norm"] == 10**26
