"""The exact verifier of kissing configurations.

Enters: a list of integer vectors, as JSON decodes it. Leaves: a `Verdict`, with the vectors that show why a set is refused. The
condition: 0 is not in C, and min |x - y| >= max |x| over the different x, y in C. It then holds that spheres around the points
2x/|x| form a kissing configuration, so that the kissing number of the dimension is at least |C|.

All arithmetic is exact: nothing is rounded and nothing wraps, because the width is chosen by a proof, and integers that no machine word
holds are multiplied as Python's own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul, sub
from typing import Any, Literal, NamedTuple

import numpy as np

Category = Literal[
    "valid", "invalid_condition", "bad_points",  # what the verifier says
    "exception", "no_points", "timeout", "cpu", "memory", "output_too_large",  # of a program that gave it nothing
]  # fmt: skip

MAX_BITS = 512  # of an entry: bounds the time of one multiplication
# Proved upper bounds of the kissing numbers of 1 to 24 dimensions (H. Cohn's table; 11: the exact certificate of 2026). They bound
# the time, not the verdict: more vectors than this cannot be valid, so the first bound + 1 of them hold a violation.
UPPER_BOUNDS = (
    2, 6, 12, 24, 44, 77, 134, 240, 363, 553, 868, 1355, 2064, 3174, 4853, 7320, 10978, 16406, 24417, 36195, 53524, 80810, 122351, 196560,
)  # fmt: skip
_BLOCK = 1_024  # vectors whose distances to all others are in memory at once
_UNDERFLOW = 2.0**-1000  # more than what is lost of a sum of products that floats cannot hold


@dataclass(frozen=True)
class Verdict:
    """What the verifier says of a set of vectors."""

    num_points: int
    dimension: int  # that the vectors must have
    validity: float  # 1.0 or 0.0
    error: str  # why the set is refused, with the vectors that show it; empty if it is valid
    category: Category
    min_squared_distance: int | None = None  # None where it was not computed; both may be too large for 64 bits
    max_squared_norm: int | None = None


class _Extremes(NamedTuple):
    min_squared_distance: int
    nearest: tuple[int, int]  # the indices of two vectors at this distance, the first such pair
    max_squared_norm: int
    zero: int | None  # the index of the zero vector


def verify(points: object, *, dim: int) -> Verdict:
    """Check whether a list of lists of ints is a kissing configuration in `dim` dimensions.

    An int is one of type int: no bool, no float however whole, no subclass. The time is bounded for any number of vectors in up to 24
    dimensions by the table of upper bounds, and the size of an entry by `MAX_BITS`.
    """

    def refused(category: Category, error: str, found: _Extremes | None = None) -> Verdict:
        least, most = (None, None) if found is None else (found.min_squared_distance, found.max_squared_norm)
        return Verdict(num_points, dim, 0.0, error, category, least, most)

    assert dim >= 1, dim
    num_points = len(points) if isinstance(points, list) else 0
    if not isinstance(points, list):
        return refused("bad_points", f"the answer is not a list of vectors ({type(points).__name__})")
    if num_points < 2:
        return refused("bad_points", f"the list has {num_points} vectors: at least 2 are needed")
    enough = UPPER_BOUNDS[dim - 1] + 1 if 1 <= dim <= len(UPPER_BOUNDS) else num_points
    found = None
    # The whole list is only looked at when its beginning is valid, which a proved bound excludes where the list is longer.
    for count in sorted({min(enough, num_points), num_points}):
        rows = points[:count]
        if problem := _shape_problem(rows, dim):
            return refused("bad_points", problem)
        found = _extremes(rows)
        where = "" if count == num_points else f"; looked at the first {count} of {num_points} vectors"
        if found.zero is not None:
            return refused("invalid_condition", f"vector {found.zero} is the zero vector", found)
        i, j = found.nearest
        if found.min_squared_distance == 0:
            return refused("invalid_condition", f"vectors {i} and {j} are equal", found)
        if found.min_squared_distance < found.max_squared_norm:
            condition = f"squared distance {found.min_squared_distance} < maximum squared norm {found.max_squared_norm}"
            return refused("invalid_condition", f"Minimum {condition} (vectors {i} and {j}{where})", found)
    assert found is not None
    return Verdict(num_points, dim, 1.0, "", "valid", found.min_squared_distance, found.max_squared_norm)


def _shape_problem(rows: Sequence[Any], dim: int) -> str:
    """Say why the rows are not vectors of `dim` ints of at most `MAX_BITS` bits; empty if they are."""
    for index, row in enumerate(rows):
        if type(row) is not list:
            return f"vector {index} is not a list ({type(row).__name__})"
        if len(row) != dim:
            return f"vector {index} has {len(row)} entries, not {dim}"
        for entry in row:
            if type(entry) is not int:
                return f"vector {index} has a non-integer entry ({type(entry).__name__})"
            if entry.bit_length() > MAX_BITS:
                return f"vector {index} has an entry of {entry.bit_length()} bits; the limit is {MAX_BITS}"
    return ""


def _extremes(rows: Sequence[Sequence[int]]) -> _Extremes:
    """The least squared distance and the largest squared norm of two or more vectors, exactly.

    A squared distance |x|^2 + |y|^2 - 2xy of d entries of size up to m is a sum of integers that adds up to at most 4dm^2 in any
    order. Below 2^53 float64 holds each partial sum exactly, below 2^63 int64 does; beyond, the integers are Python's, and floats only
    tell which pairs cannot be the nearest.
    """
    largest = max(max(map(abs, row)) for row in rows)
    bound = 4 * len(rows[0]) * largest * largest
    if bound < 2**53:
        norms, distances = _machine_distances(np.array(rows, np.float64))
    elif bound < 2**63:
        norms, distances = _machine_distances(np.array(rows, np.int64))
    else:
        norms, distances = _python_distances(rows)
    least, i, j = min(distances)
    zero = norms.index(0) if 0 in norms else None
    return _Extremes(least, (i, j), max(norms), zero)


def _machine_distances(points: np.ndarray) -> tuple[list[int], Iterator[tuple[int, int, int]]]:
    """The squared norms, and (least squared distance, i, j) with i < j for each block of i."""

    def least() -> Iterator[tuple[int, int, int]]:
        for start, squared in _blocks(points):
            i, j = divmod(int(squared.argmin()), squared.shape[1])
            yield int(squared[i, j]), start + i, start + j

    return [int(norm) for norm in (points * points).sum(axis=1)], least()


def _python_distances(rows: Sequence[Sequence[int]]) -> tuple[list[int], Iterator[tuple[int, int, int]]]:
    """As `_machine_distances`, in Python's integers, for the pairs that may be the nearest of their block by float64.

    The distances are those of the vectors minus the median of each coordinate, so that floats tell apart what is near to each other and far
    from 0. These entries, divided by the largest, have a relative error of up to u = 2^-53 each, a product of two 3u. So the sum over d
    entries is wrong by at most (d + 2)u times the sum of their sizes, and |x|^2 + |y|^2 - 2xy, with its own rounding, by
    2(d + 4)u(|x|^2 + |y|^2). It is taken twice for terms of higher order; `_UNDERFLOW` is for entries that are too small for floats.
    """
    norms = [sum(map(mul, row, row)) for row in rows]
    center = [sorted(column)[len(rows) // 2] for column in zip(*rows, strict=True)]
    moved = [list(map(sub, row, center)) for row in rows]
    squares = [sum(map(mul, row, row)) for row in moved]
    largest = max(max(map(abs, row)) for row in moved) or 1
    scaled = np.array([[x / largest for x in row] for row in moved])
    errors = 4 * (len(center) + 4) * 2.0**-53 * (scaled * scaled).sum(axis=1) + _UNDERFLOW

    def least() -> Iterator[tuple[int, int, int]]:
        for start, squared in _blocks(scaled):
            error = errors[start : start + _BLOCK, None] + errors[None, start:]
            near = np.argwhere(squared - error <= (squared + error).min())
            yield min(
                (squares[i] + squares[j] - 2 * sum(map(mul, moved[i], moved[j])), i, j)
                for i, j in (near + start).tolist()
            )

    return norms, least()


def _blocks(points: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(i, squared distances of vectors i to i + `_BLOCK` from vector i and all after it); those of pairs in no order i < j are large."""
    norms = (points * points).sum(axis=1)
    for start in range(0, len(points) - 1, _BLOCK):
        block, later = points[start : start + _BLOCK], points[start:]
        squared = norms[start : start + _BLOCK, None] + norms[None, start:] - 2 * (block @ later.T)
        squared[np.tri(len(block), len(later), dtype=bool)] = squared.max() + 1
        yield start, squared
