"""Kissing configurations with known answers, made by code: sets of integer vectors in 11 dimensions, if not said otherwise."""

import itertools
import math
from collections.abc import Sequence

Points = list[list[int]]

# A(d, 4, 4): families of quadruples of d points, pairwise meeting in at most 2, in hexadecimal digits.
QUADRUPLES = (
    "012901380147016a023a0248025703560379045a04690589078a12451268127a13461357"
    "139a14891569158a234723582369249a256a27893459348a36784568467a579a689a"
)


def axes(dim: int = 11) -> Points:
    """The starter: the 2d vectors +-2e_i."""
    return [[s * (j == i) for j in range(dim)] for i in range(dim) for s in (2, -2)]


def roots(dim: int = 11) -> Points:
    """The 2d(d - 1) roots of D_d: +-e_i +-e_j."""
    found = []
    for i, j in itertools.combinations(range(dim), 2):
        for a, b in itertools.product((1, -1), repeat=2):
            row = [0] * dim
            row[i], row[j] = a, b
            found.append(row)
    return found


def laminated_582() -> Points:
    """22 + 35 * 16 vectors of squared norm 4."""
    found = axes()
    for start in range(0, len(QUADRUPLES), 4):
        places = [int(c, 16) for c in QUADRUPLES[start : start + 4]]
        found += [_placed(places, signs) for signs in itertools.product((1, -1), repeat=4)]
    return found


def large_coordinates() -> Points:
    """The 582 with entries of up to 10^13, as the published 593 has them: products of 86 bits, contacts that are equalities."""
    return [[5 * 10**12 * x for x in row] for row in laminated_582()]


def _placed(places: list[int], values: tuple[int, ...]) -> list[int]:
    row = [0] * 11
    for place, value in zip(places, values, strict=True):
        row[place] = value
    return row


def rational_600() -> Points:
    """600 vectors with coordinates up to 200,000, after the published block structure of 604 vectors over Z[sqrt 2].

    Points 0 to 7 in 4 pairs; coordinates 8, 9, 10 are a space of three dimensions. Not rounded: the first 496 vectors.
    """
    scale = 10**5
    found: Points = [[s * 2 * scale * (j == i) for j in range(11)] for i in range(8) for s in (1, -1)]
    pairs = [(2 * g, 2 * g + 1) for g in range(4)]
    for g, h in itertools.combinations(range(4), 2):
        places = [*pairs[g], *pairs[h]]
        found += [_placed(places, tuple(scale * s for s in signs)) for signs in itertools.product((1, -1), repeat=4)]
    for k, triples in enumerate(_divisible_designs()):
        for triple in triples:
            places = [*triple, 8 + k]
            found += [
                _placed(places, tuple(scale * s for s in signs)) for signs in itertools.product((1, -1), repeat=4)
            ]
    x, r, theta = 1 - 1 / 30000, math.sqrt(2 + 3 / 30000), 1.1 * math.sqrt(6 / 30000)
    frame = [[v / 3 for v in row] for row in ([2, 1, 2], [2, -2, -1], [1, 2, -2])]
    for g in range(4):
        for positive in (True, False):
            turn = [_rotated(v, ((2 * g + (not positive)) - 3.5) * theta) for v in ([1, 0, 0], [0, 1, 0], [0, 0, 1])]
            turned = [[sum(a * v[c] for a, v in zip(row, frame, strict=True)) for c in range(3)] for row in turn]
            for s in (1, -1):
                signs = (s, s) if positive else (s, -s)
                for f, t in itertools.product(turned, (1, -1)):
                    row = [0.0] * 11
                    row[pairs[g][0]], row[pairs[g][1]] = x * signs[0], x * signs[1]
                    row[8:] = [t * r * v for v in f]
                    found.append([round(scale * v) for v in row])
    for signs in itertools.product((1, -1), repeat=3):
        corner = [sum(s * v[c] for s, v in zip(signs, frame, strict=True)) for c in range(3)]
        found.append([0] * 8 + [round(scale * 1.99 / math.sqrt(3) * v) for v in corner])
    return found


def _divisible_designs() -> list[list[tuple[int, int, int]]]:
    """3 disjoint designs: each 8 triples of points of different pairs, every two points of different pairs in one of them."""
    triples = [t for t in itertools.combinations(range(8), 3) if len({p // 2 for p in t}) == 3]

    def designs(
        chosen: list[tuple[int, int, int]], free: list[tuple[int, int, int]]
    ) -> list[list[tuple[int, int, int]]]:
        if len(chosen) == 8:
            return [chosen]
        covered = {p for t in chosen for p in itertools.combinations(t, 2)}
        pair = next(p for p in itertools.combinations(range(8), 2) if p[0] // 2 != p[1] // 2 and p not in covered)
        return [
            design
            for t in free
            if set(pair) <= set(t) and not covered & set(itertools.combinations(t, 2))
            for design in designs([*chosen, t], free)
        ]

    found = designs([], triples)
    return next(
        list(three)
        for three in itertools.combinations(found, 3)
        if all(not set(a) & set(b) for a, b in itertools.combinations(three, 2))
    )


def _rotated(v: Sequence[float], angle: float) -> list[float]:
    """A vector, turned about (1, 1, 1) by Rodrigues' formula."""
    k = 1 / math.sqrt(3)
    dot = k * sum(v)
    cross = [k * (v[2] - v[1]), k * (v[0] - v[2]), k * (v[1] - v[0])]
    cosine, sine = math.cos(angle), math.sin(angle)
    return [a * cosine + b * sine + k * dot * (1 - cosine) for a, b in zip(v, cross, strict=True)]


def overflow_exploit(dim: int = 11, base: int = 3) -> Points:
    """An invalid set that 64-bit arithmetic accepts: squares of 2^32 a + b wrap to those of b with these a."""
    found = []
    for t in itertools.islice(itertools.product(range(base), repeat=dim - 2), 1000):
        q = sum(x * x for x in t)
        a, b = [-q, *(2 * x for x in t), -1], [1, *t, q]
        found.append([(x << 32) + y for x, y in zip(a, b, strict=True)])
    return found
