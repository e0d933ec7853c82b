"""A GRPO step of Qwen2.5-Math-1.5B on an H100, counted without one: kernels, waits of the host, bytes, operations.

    python benchmarks/cuda_counts.py [--layers 28] [--rows 2 8] [--tokens auto] [--updates-only] [--kernels torch liger] [--json FILE]

Enters: nothing; the update and the embedded sampler run on the emulated devices of `tests/helpers/devices/fake_cuda.py`, with real
shapes and no numbers. Leaves: a table, and JSON for a comparison of two versions of the code.

The work: 256 rows of a prompt of 180 tokens and a response of 500, in groups of 8 with the same prompt; the weights are float32
and compute in bfloat16. Micro-batches have so many rows or, with `--tokens`, so many tokens; auto: as many as the plan of the preset
cs336 gives them on one H100. A sampling step is one in the middle of a response: 256 rows, 430 tokens before the new one.

With `--kernels liger` (needs liger-kernel) the update's norms, rotary positions, SwiGLU and what follows from logits are the fused
ones, and gradients of weights are added as they are computed: what is launched is counted, each tensor read or written once, and
once more where a kernel writes over what it has read.

Times follow from published rates alone, as if each kernel took the longest of its launch, its bytes and its operations, and
each wait of the host, after which the device has nothing to do, took as long as a few launches. They are a lower bound, not a
forecast: no kernel reaches the published rates. The floor is what the products take at the published rate or, for a sampling
step, the reading of weights and cache, nothing else.
"""

import argparse
import importlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/helpers/devices"))

import torch

from fake_cuda import FakeCuda, Work, fake_cuda
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.models.policy import Policy
from rlvr_cli.models.tiny import new_tokenizer
from rlvr_cli.models.tokens.tokenization import collate
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.training.losses.objectives import policy_gradient
from rlvr_cli.training.losses.policy_gradient import LOSSES
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.parallel.placement import place
from rlvr_cli.training.planning.memory import GPUS, memory_plan
from rlvr_cli.training.updates.update import train_update
from rlvr_cli.types import Request, SamplingParams
from shapes import math_1_5b, shape_of

PRODUCTS, MEMORY = 989e12, 3.35e12  # operations in bfloat16 and bytes a second, of an H100 SXM
LAUNCH, IN_GRAPH, WAIT = 5e-6, 1.5e-6, 20e-6  # seconds: of a kernel's launch from Python, within a graph, of a wait
ROWS, GROUP, PROMPT, RESPONSE, MIDDLE = 256, 8, 180, 500, 430


class Count(NamedTuple):
    """What happened; counts of the same work can be subtracted and multiplied."""

    kernels: float
    in_graphs: float
    captures: float
    waits: float
    bytes: float
    flops: float
    seconds: float

    def minus(self, other: "Count", times: float = 1) -> "Count":
        return Count(*(a - times * b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> "Count":
        return Count(*(factor * value for value in self))


def counted(cuda: FakeCuda) -> Count:
    """Return what happened since the last call, and begin anew."""

    def seconds(work: list[Work], least: float) -> float:
        return sum(max(least, one.bytes / MEMORY, one.flops / PRODUCTS) for one in work)

    done = cuda.work + cuda.replayed_work
    count = Count(
        len(cuda.work),
        len(cuda.replayed_work),
        cuda.captured.total(),
        cuda.waits.total(),
        sum(one.bytes for one in done),
        sum(one.flops for one in done),
        seconds(cuda.work, LAUNCH) + seconds(cuda.replayed_work, IN_GRAPH) + WAIT * cuda.waits.total(),
    )
    cuda.captured.clear()
    cuda.forget()
    return count


def update_counts(
    cuda: FakeCuda, model: Any, rows: int, *, kernels: str
) -> tuple[Count, Count, Counter[tuple[str, str]]]:
    """Return what a micro-batch of so many rows takes, what a whole update takes, and the waits of a micro-batch."""
    update = updater(cuda, model, kernels=kernels)
    update(rows, micro_batch_size=rows)  # creates the optimizer's state, and tests the model
    (two, waits_of_two), (three, waits_of_three) = (update(n * rows, micro_batch_size=rows) for n in (2, 3))
    one = three.minus(two)
    return one, three.minus(one, 3 - ROWS / rows), waits_of_three - waits_of_two


def updater(cuda: FakeCuda, model: Any, *, kernels: str) -> Callable[..., tuple[Count, Counter[tuple[str, str]]]]:
    """Return a function that does an update on so many rows, and returns what it took, and the waits."""
    policy, generator = Policy(model), torch.Generator().manual_seed(0)
    policy.kernels = kernels
    optimizer = make_optimizer(model, learning_rate=1e-5)
    loss = LOSSES["grpo_clip"].function

    def objective(inputs: Any) -> Any:
        return policy_gradient(inputs, loss=lambda inputs: loss(inputs, cliprange=0.2))

    def draw(count: int) -> list[int]:
        return torch.randint(151_000, (count,), generator=generator).tolist()

    def update(rows: int, **split: Any) -> tuple[Count, Counter[tuple[str, str]]]:
        groups = range(math.ceil(rows / GROUP))
        prompts = [prompt for _ in groups for prompt in [draw(PROMPT)] * GROUP][:rows]
        batch = collate(prompts, [draw(RESPONSE) for _ in prompts], pad_id=0)
        sampled = torch.full(batch["labels"].shape, -2.0)
        batch |= {"advantages": torch.linspace(-1, 1, len(prompts))[:, None], "sampled_log_probs": sampled}
        cuda.forget()
        train_update(
            policy,
            optimizer,
            batch | {"old_log_probs": sampled},
            learning_rate=1e-5,
            objective=objective,
            **split,
        )
        waits = cuda.waits
        return counted(cuda), waits

    return update


def tokens_of_cs336(model: Any) -> int:
    """Return the tokens that --micro-batch-tokens auto gives a micro-batch on one H100, with the embedded engine."""
    config, device = resolve(GrpoConfig, flags={"preset": "cs336"}, command="grpo"), "cuda:0"
    placement = place("auto", engine="transformers", in_process=True, cuda_devices=[device])
    plan = memory_plan(
        config, shape_of(model), placement, engine="transformers", rows=None, capacities={device: GPUS[80]}
    )
    return plan.tokens_that_fit


def sampler_counts(cuda: FakeCuda, model: Any) -> tuple[Count, Count]:
    """Return what one step takes, and what a call of the sampler takes before and after its steps, from the second call on."""
    tokenizer = new_tokenizer(["What is 1 + 2?"])
    sampler = TransformersSampler(Policy(model, tokenizer), kv_memory_bytes=2**40)
    assert not sampler.notes, sampler.notes
    ids = tuple(range(3, 13)) * (MIDDLE // 10)
    asked = [Request("", tuple(range(8)), prompt_ids=ids) for _ in range(ROWS // 8)]

    def sample(steps: int) -> Count:
        cuda.captured.clear()
        cuda.forget()
        assert len(list(sampler.sample(asked, SamplingParams(max_tokens=steps, min_tokens=0, stop=())))) == ROWS
        return counted(cuda)

    sample(8)
    short, long = sample(8), sample(12)
    step = long.minus(short).times(1 / 4)
    return step, long.minus(step, 12)


def step_counts(cuda: FakeCuda, model: Any, *, update: Count) -> dict[str, tuple[Count, float]]:
    """Return the counts of sampling and of a whole step with this update, each with its floor in seconds."""
    step, call = sampler_counts(cuda, model)
    config = model.config
    heads = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    cache = 2 * 2 * config.num_hidden_layers * heads * ROWS * MIDDLE
    least = (2 * sum(p.numel() for p in model.parameters()) + cache) / MEMORY, call.flops / PRODUCTS
    floor = update.flops / PRODUCTS + RESPONSE * least[0] + least[1]
    print(f"graphs captured in a call: {call.captures:.0f}\n")
    return {
        "sampling step": (step, least[0]),
        "sampler's call, without steps": (call, least[1]),
        "step, with the last update": (update.minus(call.minus(step, -RESPONSE), -1), floor),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28, help="of the model; fewer take less time")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8], help="of a micro-batch")
    parser.add_argument("--tokens", nargs="+", default=[], help="of a micro-batch, in place of rows: a number, or auto")
    parser.add_argument("--updates-only", action="store_true", help="leave out the sampler")
    parser.add_argument(
        "--kernels", nargs="+", choices=("torch", "liger"), default=["torch"], help="of an update's layers"
    )
    parser.add_argument("--json", help="write the counts to this file")
    arguments = parser.parse_args()
    # While there is no emulated device: what it imports looks for CUDA's own functions.
    liger = importlib.import_module("liger_launches") if "liger" in arguments.kernels else None
    found: dict[str, tuple[Count, float]] = {}  # with the floor, in seconds
    with fake_cuda(compute=False) as cuda:
        model = math_1_5b(layers=arguments.layers).to("cuda")
        waits: Counter[tuple[str, str]] = Counter()
        updates = []
        for kernels, rows in product(arguments.kernels, arguments.rows):
            with liger.launches_counted(cuda) if liger and kernels == "liger" else nullcontext():
                micro, whole, waits = update_counts(cuda, model, rows, kernels=kernels)
            by = ", liger" if kernels == "liger" else ""
            found[f"micro-batch of {rows}{by}"] = micro, micro.flops / PRODUCTS
            found[f"update, {rows} at a time{by}"] = whole, whole.flops / PRODUCTS
            updates.append(whole)
        for kernels, asked in product(arguments.kernels, arguments.tokens):
            tokens = tokens_of_cs336(model) if asked == "auto" else int(asked)
            with liger.launches_counted(cuda) if liger and kernels == "liger" else nullcontext():
                update = updater(cuda, model, kernels=kernels)
                update(GROUP, micro_batch_size=GROUP)
                whole, _ = update(ROWS, micro_batch_tokens=tokens)
            by = ", liger" if kernels == "liger" else ""
            found[f"update, {tokens:,} tokens at a time{by}"] = whole, whole.flops / PRODUCTS
        if not arguments.updates_only:
            found |= step_counts(cuda, model, update=updates[-1])
    print(f"{'':<30} {'kernels':>8} {'in graphs':>9} {'waits':>7} {'GB':>9} {'TFLOP':>9} {'ms':>9} {'floor':>8}")
    for name, (count, least) in found.items():
        print(
            f"{name:<30} {count.kernels:8,.0f} {count.in_graphs:9,.0f} {count.waits:7,.0f} {count.bytes / 1e9:9,.1f} "
            f"{count.flops / 1e12:9,.2f} {1e3 * count.seconds:9,.1f} {1e3 * least:8,.1f}"
        )
    print(f"\nwaits in a micro-batch: {dict(waits) or 'none'}")
    if arguments.json:
        rows = {name: count._asdict() | {"floor": least} for name, (count, least) in found.items()}
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
