"""Tokens that an update of 256 worked solutions computes per real token, in the micro-batches of `train_update`.

    python benchmarks/padding.py [--traces FILE] [--model PATH] [--micro-batches 2 8 32 64] [--repeats 5] [--json FILE]

Enters: worked solutions from a file such as GSM8K's train.jsonl or, by default, of generated arithmetic; each repeat
draws other ones. Leaves: for each micro-batch size, the number of tokens that the model's body computes, divided by the
number of tokens in the rows, the median over the repeats, for three ways to form micro-batches:

  ours      each prefix that rows of a micro-batch share is computed once, and no padding: rlvr_cli.training
  sorted    the same micro-batches, with rows padded to the longest of each
  drawn     rows in the order in which they were drawn, padded likewise

The handout's 128 steps of gradient accumulation are micro-batches of 2. --model names the model; rows are longer with
the built-in one, whose tokenizer has only a few hundred tokens.
"""

import argparse
import random
import statistics
from pathlib import Path

from rows import Row, write

from rlvr_cli.data.prompts import load_prompt
from rlvr_cli.data.traces import load_traces
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.log_probs import wanted_in
from rlvr_cli.models.tokens.tokenization import row_lengths, tokenize_prompt_and_output
from rlvr_cli.training.updates.micro_batches import micro_batches

ROWS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--traces", default="arithmetic:8000", help="a file of worked solutions, or any other value of --dataset"
    )
    parser.add_argument("--model", default=str(builtin_model_path()), help="a model directory")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    traces = load_traces(args.traces, load_prompt("r1_zero")).examples
    policy = load_policy(args.model)
    found: dict[tuple[int, str], list[float]] = {}
    for repeat in range(args.repeats):
        some = random.Random(repeat).sample(traces, ROWS)
        texts = [e.prompt or "" for e in some], [e.response or "" for e in some]
        batch = tokenize_prompt_and_output(*texts, policy.tokenizer)
        lengths = row_lengths(batch["response_mask"])
        real = int(lengths.sum())
        for size in args.micro_batches:
            cuts = micro_batches(batch, size, tokens=None, together=True)
            computed = 0
            for cut in cuts:
                micro = cut.of(batch)
                prefixes = wanted_in(policy, micro["input_ids"], micro["response_mask"]).prefixes
                computed += micro["input_ids"].numel() if prefixes is None else len(prefixes.tokens)
            drawn = sum(len(rows) * int(rows.max()) for rows in lengths.split(size))
            for name, tokens in (
                ("ours", computed),
                ("sorted", sum(len(cut.rows) * cut.width for cut in cuts)),
                ("drawn", drawn),
            ):
                found.setdefault((size, name), []).append(tokens / real)
    print(f"{len(traces)} traces of {args.traces}; tokens computed, of those that {ROWS} rows have")
    print(f"micro-batch {'ours':>9} {'sorted':>9} {'drawn':>9}")
    work = f"{ROWS} worked solutions of {Path(args.traces).name}"
    lines = []
    for size in args.micro_batches:
        ours, ordered, drawn = (statistics.median(found[size, name]) for name in ("ours", "sorted", "drawn"))
        print(f"{size:11} {ours:9.1%} {ordered:9.1%} {drawn:9.1%}")
        what = f"micro-batches of {size}"
        lines += [
            Row(f"real tokens among those computed, {what}", work, "all", "share", min(1.0, 1 / ours), 1.0, ">= 0.95"),
            Row(f"tokens computed, {what}", work, "rows padded as drawn", "of real ones", ours, drawn, "<= 1"),
        ]
    write(args.json, lines)


if __name__ == "__main__":
    main()
