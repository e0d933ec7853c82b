"""Programs for `rlvr discover`, responses with them, and what two runs of one search must have in common."""

import json
from pathlib import Path

from rlvr_cli.runs.readers import read_rollouts

AXES = "points = [[s * 2 * (i == j) for j in range(11)] for i in range(11) for s in (1, -1)]"
ROOTS = """
from itertools import combinations, product
def get_centers():
    found = []
    for i, j in combinations(range(11), 2):
        for a, b in product((1, -1), repeat=2):
            found.append([a * (k == i) + b * (k == j) for k in range(11)])
    return found
"""
CODE = """
import itertools
B = "012901380147016a023a0248025703560379045a04690589078a12451268127a13461357139a14891569158a234723582369249a256a27893459348a36784568467a579a689a"
def run_code():
    blocks = [[int(c, 16) for c in B[i:i + 4]] for i in range(0, 140, 4)]
    points = [[s * (j == i) for j in range(11)] for i in range(11) for s in (2, -2)]
    for block in blocks:
        for signs in itertools.product((1, -1), repeat=4):
            v = [0] * 11
            for k, s in zip(block, signs):
                v[k] = s
            points.append(v)
    return (points,)
"""
TOO_NEAR = "points = [[2] + [0] * 10, [1, 1] + [0] * 9]"
WRONG = "raise ValueError('of mine')"
UNLIKE = ("run_id", "sampled_at")  # what two runs of the same search may differ in, with the seconds of an attempt


def fenced(program: str) -> str:
    return f"Let me see.\n```python\n{program.strip()}\n```\n"


def write_responses(path: Path, responses: list[str]) -> Path:
    path.write_text("".join(json.dumps({"response": response}) + "\n" for response in responses))
    return path


def attempts_of(run: Path) -> list[dict]:
    """The rows of a run, by number, without what may differ."""
    rows = [{k: v for k, v in row.items() if k not in UNLIKE} for row in read_rollouts(run).to_pylist()]
    for row in rows:
        row["candidate"].pop("seconds")
    return sorted(rows, key=lambda row: row["candidate"]["number"])


def files_of(run: Path) -> dict[str, bytes]:
    """The files that a search leaves beside its rows."""
    paths = [*run.glob("points/*"), *run.glob("best/*"), run / "report.md", run / "conversation_log.json"]
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in paths if path.is_file()}
