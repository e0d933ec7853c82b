"""Log-probabilities and entropies of tokens from hidden states, forward and backward: peak memory and time.

    python benchmarks/log_probs.py [--tokens 2048] [--vocabulary 151936] [--hidden 1536] [--repeats 5] [--threads 2] [--json FILE]

Random hidden states and a random output layer, float32, on the CPU; the log-probability of each token has its own
weight in the loss, as in a policy gradient.

  ours           rlvr_cli.models.log_probs: in chunks of the vocabulary, recomputed in the backward pass; exact
                 entropies too
  plain          log_softmax over all logits, and the entropies from it
  torch          torch.nn.functional.linear_cross_entropy without options: over all logits; no entropies
  torch chunked  the same with LinearCrossEntropyOptions(): in chunks of positions; no entropies
  Liger          LigerFusedLinearCrossEntropyFunction, if liger-kernel is installed and runs here; no entropies

Every measurement runs in its own process, and the ways take turns within a repeat, in an order that is reversed every
second repeat; the results are medians. Each process first solves a toy problem, so that all libraries are loaded.

Peak memory is the high-water mark of the process's resident memory (Linux: VmHWM, reset by /proc/self/clear_refs),
minus the memory that the process held before its tensors were made. `peak` is all of that; `beyond` leaves out what
every way needs: the hidden states, the output layer, and the gradients of both. `later` is `beyond` in a second
backward pass that adds to existing gradients, as in gradient accumulation. MB are 10^6 bytes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rows import Row, write
from torch import Tensor

# hidden states (tokens, hidden), output layer (vocabulary, hidden), labels -> log-probabilities (tokens,) and entropies
Way = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def ours(states: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    from rlvr_cli.models.log_probs import _linear_log_probs

    log_probs, entropy = _linear_log_probs(states, weight, None, labels, temperature=1.0)
    assert entropy is not None
    return log_probs, entropy.detach()


def plain(states: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    log_p = (states @ weight.T).log_softmax(-1)
    detached = log_p.detach()
    return log_p.gather(-1, labels[:, None]).squeeze(-1), -(detached.exp() * detached).sum(-1)


def of_torch(states: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    return -F.linear_cross_entropy(states, weight, labels, reduction="none"), None


def of_torch_chunked(states: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    options = torch.nn.LinearCrossEntropyOptions()
    return -F.linear_cross_entropy(states, weight, labels, reduction="none", options=options), None


def of_liger(states: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    out = LigerFusedLinearCrossEntropyFunction.apply(states, weight, labels, None, None, -100, 0.0, 0.0, "none")
    return -(out[0] if isinstance(out, tuple) else out), None


WAYS: dict[str, Way] = {
    "ours": ours,
    "plain": plain,
    "torch": of_torch,
    "torch chunked": of_torch_chunked,
    "Liger": of_liger,
}
NAMES = {
    "plain": "log_softmax over full logits",
    "torch": "torch linear_cross_entropy, without options, no entropies",
    "torch chunked": "torch linear_cross_entropy, chunked, no entropies",
    "Liger": "Liger fused linear cross-entropy, no entropies",
}
GOALS = {"plain": ("<= 0.15", "<= 1.1")}  # for `beyond` and for the time; for the other ways, no worse than theirs


def resident(field: str = "VmRSS") -> int:
    """Return the resident bytes of this process, or with "VmHWM" the most since the mark was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"no {field} in /proc/self/status: the memory is measured on Linux only")


def problem(tokens: int, vocabulary: int, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, the output layer, labels, and each token's weight in the loss."""
    torch.manual_seed(0)
    weight = torch.empty(vocabulary, hidden).normal_(0, 0.02).requires_grad_()
    states = torch.randn(tokens, hidden, requires_grad=True)
    return states, weight, torch.randint(vocabulary, (tokens,)), torch.randn(tokens)


def measure(way: Way, *, tokens: int, vocabulary: int, hidden: int) -> dict[str, float]:
    """Return seconds, peak bytes and checksums of one pass, and the peak bytes of a second one."""
    states, weight, labels, upstream = problem(64, 1000, hidden)
    (way(states, weight, labels)[0] * upstream).sum().backward()
    del states, weight, labels, upstream
    before = resident()
    states, weight, labels, upstream = problem(tokens, vocabulary, hidden)
    needed = 2 * 4 * (states.numel() + weight.numel())
    seconds, peaks, norms = [], [], []
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")
        started = time.perf_counter()
        log_probs, entropy = way(states, weight, labels)
        (log_probs * upstream).sum().backward()
        seconds.append(time.perf_counter() - started)
        peaks.append(resident("VmHWM") - before)
        assert weight.grad is not None
        norms.append(float(weight.grad.norm()))
        total = float(entropy.sum()) if entropy is not None else float("nan")
        del log_probs, entropy
    return {
        "seconds": seconds[0],
        "peak": peaks[0],
        "beyond": peaks[0] - needed,
        "later": peaks[1] - needed,
        "entropy": total / tokens,
        "gradient": norms[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1_536)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in ("tokens", "vocabulary", "hidden")}
    if arguments.measure:
        torch.set_num_threads(arguments.threads)
        print(json.dumps(measure(WAYS[arguments.measure], **sizes)))
        return
    options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    options += ["--threads", str(arguments.threads)]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in arguments.ways}
    for repeat in range(arguments.repeats):
        for way in list(found)[:: -1 if repeat % 2 else 1]:
            command = [sys.executable, __file__, *options, "--measure", way]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"{way} does not run here: {(done.stderr.strip().splitlines() or ['killed'])[-1][:100]}")
                del found[way]
            else:
                found[way].append(json.loads(done.stdout))
    middle = {way: {k: statistics.median(run[k] for run in runs) for k in runs[0]} for way, runs in found.items()}
    head = f"{'seconds':>8} {'peak MB':>8} {'beyond':>7} {'later':>7} {'entropy':>9} {'gradient':>9}"
    print(f"{'':<14} {head}   of plain: {'seconds':>7} {'beyond':>7} {'later':>7}")
    for way, row in middle.items():
        megabytes = {name: row[name] / 1e6 for name in ("peak", "beyond", "later")}
        text = f"{way:<14} {row['seconds']:>8.2f} {megabytes['peak']:>8.0f} {megabytes['beyond']:>7.0f} {megabytes['later']:>7.0f}"
        text += f" {row['entropy']:>9.5f} {row['gradient']:>9.4f}"
        if base := middle.get("plain"):
            seconds, beyond, later = (row[name] / base[name] for name in ("seconds", "beyond", "later"))
            text += f" {seconds:>18.2f}x {beyond:>6.3f}x {later:>6.3f}x"
        print(text)
    if "ours" not in middle:
        return
    work = f"vocabulary {arguments.vocabulary:,}, hidden {arguments.hidden:,}, {arguments.tokens:,} tokens, head only, {arguments.threads} threads"
    rows = []
    for way in middle.keys() - {"ours"}:
        of_memory, of_time = GOALS.get(way, ("<= 1", "<= 1"))
        pairs = (("beyond", "peak memory", "MB", 1e6, of_memory), ("seconds", "time", "s", 1, of_time))
        for key, what, unit, scale, goal in pairs:
            values = middle["ours"][key] / scale, middle[way][key] / scale
            rows.append(
                Row(f"log-probs + entropy, forward and backward: {what}", work, NAMES[way], unit, *values, goal)
            )
    write(arguments.json, rows)


if __name__ == "__main__":
    main()
