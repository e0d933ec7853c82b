"""How many of the positions that an update computes are real tokens, as `train_update` cuts 256 responses into micro-batches.

    python benchmarks/padding.py [--traces FILE] [--model PATH] [--micro-batches 2 8 32 64] [--repeats 5] [--json FILE]

Enters: worked solutions, of a file such as GSM8K's train.jsonl or, by default, of the generated arithmetic; each repeat draws
others. Leaves: the share of real positions for each size of a micro-batch, the median over the repeats, as they are cut

  ours      sorted by length, so many rows each: rlvr_cli.training
  drawn     in the order in which they were drawn, so many rows each, padded to the longest of them
  balanced  sorted by length, as many micro-batches as ours, each with no more positions than the largest of ours, cut where
            least is padded: what could still be had

The handout's 128 steps of gradient accumulation are micro-batches of 2. --model names the tokenizer; the built-in model's has
a few hundred tokens, so that lengths are larger with it and their spread about the same.
"""

import argparse
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rows import Row, write
from transformers import AutoTokenizer

import rlvr_cli
from rlvr_cli.prompts import load_prompt
from rlvr_cli.tokens import tokenize_prompt_and_output
from rlvr_cli.traces import load_traces
from rlvr_cli.training import _micro_batches

BUILTIN = Path(rlvr_cli.__file__).parent / "assets" / "tiny-math"
ROWS = 256


def ours(lengths: Sequence[int], batch: Any, size: int) -> tuple[int, int]:
    """Positions and micro-batches."""
    cut = _micro_batches(batch, size)
    return sum(len(rows) * width for rows, width, _ in cut), len(cut)


def drawn(lengths: Sequence[int], batch: Any, size: int) -> tuple[int, int]:
    cut = [lengths[start : start + size] for start in range(0, len(lengths), size)]
    return sum(len(some) * max(some) for some in cut), len(cut)


def balanced(lengths: Sequence[int], batch: Any, size: int) -> tuple[int, int]:
    """Least padding by dynamic programming: best[i] positions for the i longest rows."""
    descending = sorted(lengths, reverse=True)
    most, count = size * descending[0], -(-len(descending) // size)
    best: list[float] = [0, *[float("inf")] * len(descending)]
    for _ in range(count):
        best = [
            min(
                (
                    best[start] + (end - start) * descending[start]
                    for start in range(end)
                    if (end - start) * descending[start] <= most
                ),
                default=0,
            )
            for end in range(len(descending) + 1)
        ]
        best[0] = 0
    return int(best[-1]), count


WAYS = {"ours": ours, "drawn": drawn, "balanced": balanced}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--traces", default="arithmetic:8000", help="a file of worked solutions, or what --dataset takes"
    )
    parser.add_argument("--model", default=str(BUILTIN), help="a directory with a tokenizer")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write the rows there")
    args = parser.parse_args()
    traces = load_traces(args.traces, load_prompt("r1_zero")).examples
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    shares: dict[tuple[int, str], list[float]] = {}
    for repeat in range(args.repeats):
        some = random.Random(repeat).sample(traces, ROWS)
        batch = tokenize_prompt_and_output([e.prompt or "" for e in some], [e.response or "" for e in some], tokenizer)
        width = batch["response_mask"].shape[1]
        at = torch.arange(1, width + 1) * batch["response_mask"].bool()
        lengths = at.amax(1).tolist()
        for size in args.micro_batches:
            for name, way in WAYS.items():
                shares.setdefault((size, name), []).append(sum(lengths) / way(lengths, batch, size)[0])
    print(f"{len(traces)} traces of {args.traces}; share of real positions of {ROWS} responses")
    print("micro-batch " + "".join(f"{name:>10}" for name in WAYS))
    rows = []
    for size in args.micro_batches:
        middle = {name: statistics.median(shares[size, name]) for name in WAYS}
        print(f"{size:11} " + "".join(f"{middle[name]:10.2%}" for name in WAYS))
        what = f"padding: real tokens, micro-batches of {size}"
        source = Path(args.traces).name if Path(args.traces).exists() else args.traces
        rows.append(
            Row(
                what,
                f"{ROWS} worked solutions of {source}",
                "all that are computed",
                "share",
                middle["ours"],
                1.0,
                ">= 0.95",
            )
        )
    write(args.json, rows)


if __name__ == "__main__":
    main()
