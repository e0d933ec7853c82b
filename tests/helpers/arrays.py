"""Covering arrays of options: few configurations in which every two values occur together."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows with one value per name, such that each two values of different names are together in one row at least.

    Greedy: a row starts with the first pair that is still missing, and takes name after name the value that adds most pairs
    (of equally good ones the first). The same values always give the same rows.
    """
    names = list(values)
    missing = {
        ((a, i), (b, j))
        for a, b in combinations(range(len(names)), 2)
        for i in range(len(values[names[a]]))
        for j in range(len(values[names[b]]))
    }
    rows = []
    while missing:
        row = dict(min(missing))
        for place in sorted(set(range(len(names))) - set(row)):
            added = [_pairs(row, place, choice) for choice in range(len(values[names[place]]))]
            row[place] = max(range(len(added)), key=[len(pairs & missing) for pairs in added].__getitem__)
        missing -= set(combinations(sorted(row.items()), 2))
        rows.append({name: values[name][row[place]] for place, name in enumerate(names)})
    return rows


def every_two(**values: Sequence[Any]) -> tuple[str, list[Any]]:
    """Arguments of `pytest.mark.parametrize`: every configuration, of which all that `pairwise` can do without are slow."""
    few = [tuple(row.values()) for row in pairwise(values)]
    marks = {False: pytest.mark.slow, True: ()}
    return ",".join(values), [pytest.param(*row, marks=marks[row in few]) for row in product(*values.values())]


def _pairs(row: Mapping[int, int], place: int, choice: int) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return {(min(a, (place, choice)), max(a, (place, choice))) for a in row.items()}
