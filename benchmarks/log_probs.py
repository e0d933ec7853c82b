"""Log-probabilities and entropy of response tokens from hidden states, forward and backward: time and peak memory.

    python benchmarks/log_probs.py [--vocabulary 151936] [--hidden 1536] [--tokens 2048] [--repeat 5] [--threads 2]

Enters: nothing; hidden states and an output layer are random, float32. Leaves: one row per way of doing it, each in a process of its own: median
seconds, and the memory at its peak beyond the hidden states, the output layer and their gradients, which every way needs.

ours      rlvr_cli.tokens: the output layer runs over chunks of positions, and again in the backward pass; exact entropy besides
plain     log_softmax over all logits, and the entropy from it
no entropy  the same without the entropy
torch     torch.nn.functional.linear_cross_entropy, where this torch has it; no entropy
Liger     LigerFusedLinearCrossEntropyFunction, where liger-kernel is installed and runs on this device; no entropy
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

WAYS = ("ours", "plain", "no entropy", "torch", "Liger")


def run(way: str, *, vocabulary: int, hidden: int, tokens: int, repeat: int, threads: int) -> dict[str, float]:
    """Seconds of each repetition and peak bytes beyond what is given; raises what the way raises."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    weight = torch.empty(vocabulary, hidden).normal_(0, 0.02).requires_grad_()
    states = torch.randn(tokens, hidden, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    upstream = torch.randn(tokens)

    def ours():
        from rlvr_cli.tokens import _linear_log_probs

        log_probs, entropy = _linear_log_probs(states, weight, None, labels, temperature=1.0, chunk_size=256)
        return log_probs, entropy.detach()

    def plain():
        log_p = (states @ weight.T).log_softmax(-1)
        return log_p.gather(-1, labels[:, None]).squeeze(-1), -(log_p.detach().exp() * log_p.detach()).sum(-1)

    def no_entropy():
        return (states @ weight.T).log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1), None

    def of_torch():
        return -F.linear_cross_entropy(states, weight, labels, reduction="none"), None  # type: ignore[attr-defined]  (newer torch only)

    def liger():
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        out = LigerFusedLinearCrossEntropyFunction.apply(states, weight, labels, None, None, -100, 0.0, 0.0, "none")
        return -(out[0] if isinstance(out, tuple) else out), None

    ways = dict(zip(WAYS, (ours, plain, no_entropy, of_torch, liger), strict=True))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(repeat):
        weight.grad = states.grad = None
        started = time.perf_counter()
        log_probs, _ = ways[way]()
        (log_probs * upstream).sum().backward()
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": statistics.median(seconds),
        "peak_mb": (peak - before) / 1024,
        "checksum": float(states.grad.norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1_536)
    parser.add_argument("--tokens", type=int, default=2_048)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = {k: v for k, v in vars(arguments).items() if k != "way"}
    if arguments.way:
        print(json.dumps(run(arguments.way, **sizes)))
        return
    options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    found: dict[str, dict[str, float]] = {}
    for way in WAYS:
        done = subprocess.run([sys.executable, __file__, *options, "--way", way], capture_output=True, text=True)
        if done.returncode:
            print(f"{way:<11} does not run here: {done.stderr.strip().splitlines()[-1][:110]}")
        else:
            found[way] = json.loads(done.stdout)
    base = found["plain"]
    print(f"{'way':<11} {'seconds':>8} {'of plain':>9} {'peak MB':>8} {'of plain':>9} {'gradient norm':>14}")
    for way, row in found.items():
        ratios = row["seconds"] / base["seconds"], row["peak_mb"] / base["peak_mb"]
        print(
            f"{way:<11} {row['seconds']:>8.2f} {ratios[0]:>8.2f}x {row['peak_mb']:>8.0f} {ratios[1]:>8.2f}x {row['checksum']:>14.4f}"
        )


if __name__ == "__main__":
    main()
