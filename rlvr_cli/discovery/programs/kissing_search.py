"""Where `--proposer mutate` starts: integer vectors of one norm, taken greedily and then exchanged (tabu search).

A line `NAME = value  # one of ...` is a parameter, which the proposer changes.
"""

import numpy as np

DIM = 11
NORM = 2  # one of 2, 3, 4, 5
SEED = 0  # one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9
ITERATIONS = 2000  # one of 0, 2000, 8000, 16000
TENURE = 7  # one of 2, 7, 20, 50
SWAP = "random"  # one of "random", "oldest"
START = "random"  # one of "random", "sorted"
MOST = 6000  # vectors that are looked at: memory grows with the square


def shell(norm, dim):
    """All integer vectors of this squared length, as tuples."""
    if dim == 0:
        return [()] if norm == 0 else []
    largest = int(norm**0.5)
    return [(x, *rest) for x in range(-largest, largest + 1) for rest in shell(norm - x * x, dim - 1)]


def run_code():
    """Return ([vector, ...],): as many vectors as were found, no two of them nearer than their length."""
    random = np.random.default_rng(SEED)
    vectors = np.array(shell(NORM, DIM), np.float32)  # (n, DIM)
    vectors = vectors[random.permutation(len(vectors))[:MOST]]
    if START == "sorted":
        vectors = vectors[np.lexsort(vectors.T)]
    near = vectors @ vectors.T > NORM / 2  # (n, n): |x - y|^2 = 2 NORM - 2 xy is below NORM
    np.fill_diagonal(near, False)

    chosen = np.zeros(len(vectors), bool)
    against = np.zeros(len(vectors), np.int32)  # how many of the chosen are too near
    for i in range(len(vectors)):
        if not against[i]:
            chosen[i] = True
            against += near[i]
    best = chosen.copy()
    free_from = np.zeros(len(vectors), np.int64)  # the iteration from which a vector may be taken again
    for iteration in range(ITERATIONS):
        allowed = ~chosen & (free_from <= iteration)
        if not allowed.any():
            continue
        candidates = np.flatnonzero(allowed & (against == against[allowed].min()))
        if SWAP == "oldest":
            candidates = candidates[free_from[candidates] == free_from[candidates].min()]
        new = candidates[random.integers(len(candidates))]
        for old in np.flatnonzero(near[new] & chosen):
            chosen[old] = False
            against -= near[old]
            free_from[old] = iteration + TENURE + random.integers(TENURE)
        chosen[new] = True
        against += near[new]
        if chosen.sum() > best.sum():
            best = chosen.copy()
    return (vectors[best].astype(int).tolist(),)
