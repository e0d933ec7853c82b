"""Write the fixed JSONL files beside this script: `python datasets/generate.py`.

Enters: nothing. Leaves: the rows of rlvr_cli/data/synthetic.py at seed 0, so that `arithmetic` in its training split
is `arithmetic:2000:0`.
"""

import json
from pathlib import Path

from rlvr_cli.data.synthetic import arithmetic, countdown, multiplication

FILES = {
    "arithmetic-train.jsonl": (arithmetic, 2000, "train"),
    "arithmetic-validation.jsonl": (arithmetic, 256, "validation"),
    "countdown-train.jsonl": (countdown, 1000, "train"),
    "countdown-validation.jsonl": (countdown, 256, "validation"),
    "multiplication-train.jsonl": (multiplication, 1000, "train"),
    "multiplication-validation.jsonl": (multiplication, 256, "validation"),
}


def content(name: str) -> bytes:
    """The bytes of one of FILES."""
    make, size, split = FILES[name]
    rows = (
        {"id": e.id, "question": e.question, "ground_truth": e.ground_truth}
        | ({"turns": [{"role": role, "text": text} for role, text in e.turns]} if e.turns else {"response": e.response})
        for e in make(size, seed=0, split=split)
    )
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


if __name__ == "__main__":
    for name in FILES:
        Path(__file__).with_name(name).write_bytes(content(name))
