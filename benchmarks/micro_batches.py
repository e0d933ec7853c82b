"""CPU seconds of an update on a CPU by what a micro-batch holds: rows that are asked for, or so many tokens.

    python benchmarks/micro_batches.py [--size 0.4M] [--rows 256] [--prompt 15] [--response 8 32] [--repeats 7] [SPLIT...]

A SPLIT is `64` rows or `2048t` tokens; the first one is what the others are compared with. Enters: nothing; the batch is random
tokens, groups of 8 with the same prompt and responses of these lengths. Leaves: a table; each update is that of
`rlvr grpo --preset quickstart`, on one core. The splits take turns, in an order that is reversed every second time. A model other than
0.4M, the built-in one, is random.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from grpo_step import SIZES, shape_of

from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.policy import Policy
from rlvr_cli.models.tokens.tokenization import Batch, collate
from rlvr_cli.training.losses.objectives import policy_gradient
from rlvr_cli.training.losses.policy_gradient import LOSSES
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.updates.update import train_update

GROUP = 8
LOSS = LOSSES["reinforce_with_baseline"].function


def policy_of(size: str) -> Policy:
    """Return the built-in model, or a random one of this size with its tokenizer."""
    policy = load_policy(builtin_model_path(), device="cpu")
    if size == "0.4M":
        return policy
    config = type(policy.model.config)(**shape_of(size, policy.tokenizer))
    return Policy(AutoModelForCausalLM.from_config(config).eval(), policy.tokenizer)


def batch_of(policy: Policy, *, rows: int, prompt: int, shortest: int, longest: int) -> Batch:
    """Return random rows in groups, each with an advantage."""
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(5, policy.model.config.vocab_size) for _ in range(count)]

    prompts = [own for _ in range(rows // GROUP) for own in [tokens(prompt)] * GROUP]
    batch = collate(prompts, [tokens(draw.randint(shortest, longest)) for _ in prompts], pad_id=0)
    sampled = torch.full(batch["labels"].shape, -2.0)
    return batch | {"advantages": torch.linspace(-1, 1, rows)[:, None], "sampled_log_probs": sampled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("splits", nargs="*", default=["64", "1024t", "2048t", "4096t", "8192t"], metavar="SPLIT")
    parser.add_argument("--size", choices=SIZES, default="0.4M")
    parser.add_argument("--rows", type=int, default=256, help="of the update")
    parser.add_argument("--prompt", type=int, default=15, help="tokens")
    parser.add_argument("--response", type=int, nargs=2, default=[8, 32], help="tokens of the shortest and the longest")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    policy = policy_of(arguments.size)
    optimizer = make_optimizer(policy, learning_rate=1e-6)
    shortest, longest = arguments.response
    batch = batch_of(policy, rows=arguments.rows, prompt=arguments.prompt, shortest=shortest, longest=longest)

    def update(split: str) -> tuple[float, float]:
        """Return the CPU seconds and the number of micro-batches of an update."""
        name = "micro_batch_tokens" if split.endswith("t") else "micro_batch_size"
        how: dict[str, Any] = {name: int(split.removesuffix("t")), "objective": lambda i: policy_gradient(i, loss=LOSS)}
        begun = time.process_time()
        metrics = train_update(policy, optimizer, dict(batch), learning_rate=1e-6, **how)
        return time.process_time() - begun, metrics["update/micro_batches"]

    number = {split: update(split)[1] for split in arguments.splits}  # these are warm afterwards
    seconds: dict[str, list[float]] = {split: [] for split in arguments.splits}
    for turn in range(arguments.repeats):
        for split in arguments.splits if turn % 2 == 0 else reversed(arguments.splits):
            seconds[split].append(update(split)[0])
    first = seconds[arguments.splits[0]]
    print(f"{'split':<8} {'micro-batches':>13} {'CPU seconds':>12} {'ratio':>7}")
    for split, own in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(own, first, strict=True))
        print(f"{split:<8} {number[split]:13.0f} {statistics.median(own):12.3f} {ratio:7.2f}")


if __name__ == "__main__":
    main()
