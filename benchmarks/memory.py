"""The plan's memory lines beside the traced peak of the same update, at the shapes of Qwen2.5, without a GPU.

    python benchmarks/memory.py [--sizes 0.5B 1.5B 3B 7B] [--rows 2 8] [--json FILE]

The trace runs `train_update` on emulated CUDA tensors (tests/helpers/devices/fake_cuda.py), which have shapes and no numbers, and counts
the bytes that are alive: all of the package's own code, of transformers and of autograd, and of no kernel's workspace or
allocator's gap. An update has two micro-batches of `--rows` responses of 1,280 tokens with their prompts, none shared. GiB.
"""

import argparse
import json
import sys
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/helpers/devices"))

from rlvr_cli.config.grpo import GrpoConfig
from shapes import SIZES
from traced import traced

CHOICES = {
    "float32": {},
    "float32, 8bit": {"optimizer": "adamw_8bit"},
    "float32, offloaded": {"offload_optimizer": True},
    "bfloat16": {"param_dtype": "bfloat16"},
    "bfloat16, kahan": {"param_dtype": "bfloat16", "optimizer": "adamw_kahan"},
    "bfloat16, 8bit": {"param_dtype": "bfloat16", "optimizer": "adamw_8bit"},
    "bfloat16, offloaded": {"param_dtype": "bfloat16", "offload_optimizer": True},
    "float32, LoRA": {"lora_rank": 32},
    "bfloat16, LoRA": {"param_dtype": "bfloat16", "lora_rank": 32},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--rows", nargs="+", type=int, default=[2, 8], help="responses in a micro-batch")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    found = []
    print("| model | weights and optimizer | rows | checkpointing | plan | trace | plan / trace |")
    print("|---|---|--:|---|--:|--:|--:|")
    for size, (name, options), rows, again in product(given.sizes, CHOICES.items(), given.rows, (False, True)):
        started = time.perf_counter()
        result = traced(GrpoConfig(**options, gradient_checkpointing=again), size, rows=rows)
        plan, trace = sum(result.planned.values()) / 2**30, result.peak / 2**30
        cells = [size, name, rows, "yes" if again else "no", f"{plan:.1f}", f"{trace:.1f}", f"{result.ratio:.2f}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        found.append(
            {"size": size, "choice": name, "rows": rows, "checkpointing": again, "plan": plan, "trace": trace}
            | {"terms": result.planned, "seconds": time.perf_counter() - started}
        )
    ratios = [row["plan"] / row["trace"] for row in found]
    print(f"\n{len(found)} updates: the plan is {min(ratios):.2f} to {max(ratios):.2f} of the trace")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
