"""Tokens per second of supervised fine-tuning, compared with TRL's SFTTrainer.

    python benchmarks/sft.py [--updates 20] [--repeats 5] [--threads 1] [--json FILE]

The quickstart's SFT on both sides, on a CPU: an untrained model of `python -m rlvr_cli.models.tiny`, 8,000 arithmetic
traces in the r1_zero prompt, batches of 16 in random order, loss on the responses only, EOS after each, AdamW at 2e-3
with its warm-up and cosine schedule. A rate is tokens over the wall time of the whole loop, with collating, metrics and
progress, but without loading and evaluation. Two rates are given: of all tokens but padding (the one that is compared),
and of response tokens, on which the loss is computed. Each way has its own process. Its first updates are left out;
then they take turns of --updates each while the others wait, in an order that is reversed every second repeat, so that
a change of the machine's speed affects all of them. The result is the median over repeats.

ours         `rlvr sft` itself, with a clock and a counter around `Trainer.update`
ours packed  the same with --packing: an update is one sequence of as many tokens as 16 traces have on average
TRL          in the settings that suit it best here: no gradient checkpointing, float32, no checkpoints, metrics logged
             every 10th update, no progress bar
TRL packed   the same with TRL's packing, in sequences of that length, end to end in one row without padding. TRL supports
             it with FlashAttention only, and warns; here it runs with torch's attention, whose mask keeps the traces apart
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from grpo_step import wait_for_turn, workers
from rows import Row, write

ROOT = Path(__file__).parents[1]
PRESET = ROOT / "rlvr_cli" / "config" / "presets" / "quickstart.toml"
WARM_UP = 10  # updates left out
WAYS = ("ours", "ours packed", "TRL", "TRL packed")


class Turns:
    """Counts a worker's updates, and ends a turn after every `updates` of them."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self._begin(WARM_UP)

    def _begin(self, updates: int) -> None:
        self.left, self.tokens, self.responses, self.begun = updates, 0, 0, time.perf_counter()

    def add(self, tokens: int, responses: int) -> None:
        """Count an update that trained on so many tokens."""
        self.left, self.tokens, self.responses = self.left - 1, self.tokens + tokens, self.responses + responses
        if not self.left:
            seconds = time.perf_counter() - self.begun
            wait_for_turn(seconds=seconds, tokens=self.tokens, responses=self.responses)
            self._begin(self.updates)


def packed_length(tokenizer: Any, examples: list[Any], *, batch_size: int) -> int:
    """The tokens that so many traces have on average, each with EOS."""
    lengths = [len(tokenizer(f"{e.prompt}{e.response}").input_ids) + 1 for e in examples]
    return round(batch_size * statistics.mean(lengths))


def ours(model: str, *, updates: int, total: int, packed: bool) -> NoReturn:
    """Run `rlvr sft`."""
    from rlvr_cli.commands import sft
    from rlvr_cli.config.parsing.sources import resolve
    from rlvr_cli.config.sft import SftConfig
    from rlvr_cli.data.prompts import load_prompt
    from rlvr_cli.data.traces import load_traces
    from rlvr_cli.models.pretrained import load_tokenizer
    from rlvr_cli.training.trainer import Trainer

    turns = Turns(updates)
    update = Trainer.update

    def watched(self: Trainer, batch: Any, **how: Any) -> dict[str, float]:
        metrics = update(self, batch, **how)
        mask = batch["response_mask"]
        last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)  # the label at t is token t + 1
        turns.add(int((last + 2).sum()), int(mask.sum()))
        return metrics

    Trainer.update = watched  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as runs:
        flags = {"preset": "quickstart", "model": model, "n_sft_steps": total, "eval_every": 0, "eval_examples": 1}
        if packed:
            preset = tomllib.loads(PRESET.read_text())["sft"]
            examples = load_traces(preset["dataset"], load_prompt("r1_zero")).examples
            length = packed_length(load_tokenizer(model), examples, batch_size=preset["train_batch_size"])
            flags |= {"packing": True, "packing_length": length, "train_batch_size": 1, "micro_batch_size": 1}
        sft.run(resolve(SftConfig, flags={**flags, "runs_dir": runs}, command="sft"))
    raise AssertionError("unreachable: the process ends after its last turn")


def of_trl(model: str, *, updates: int, total: int, packed: bool, threads: int) -> NoReturn:
    """Run TRL's trainer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    import datasets
    from rlvr_cli.data.prompts import load_prompt
    from rlvr_cli.data.traces import load_traces

    torch.set_num_threads(threads)
    preset = tomllib.loads(PRESET.read_text())["sft"]
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    examples = load_traces(preset["dataset"], load_prompt("r1_zero")).examples
    rows = [{"prompt": e.prompt, "completion": e.response} for e in examples]
    batch_size, packing = preset["train_batch_size"], {}
    if packed:
        packing = {"packing": True, "max_length": packed_length(tokenizer, examples, batch_size=batch_size)}
        batch_size = 1
    turns = Turns(updates)

    class Watched(SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any, **how: Any) -> Any:
            labels = inputs["labels"]
            there = inputs["attention_mask"].sum() if "attention_mask" in inputs else labels.numel()
            self.counts = int(there), int((labels != -100).sum())
            return super().training_step(model, inputs, *rest, **how)

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.add(*trainer.counts)

    with tempfile.TemporaryDirectory() as directory:
        config = SFTConfig(
            output_dir=directory,
            max_steps=total,
            per_device_train_batch_size=batch_size,
            completion_only_loss=True,
            learning_rate=preset["learning_rate"],
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            warmup_steps=preset["warmup_steps"],
            adam_beta2=0.95,
            weight_decay=preset["weight_decay"],
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to="none",
            logging_steps=10,
            disable_tqdm=True,
            seed=0,
            **packing,
        )
        trainer = Watched(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True),
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    raise AssertionError("unreachable: the process ends after its last turn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20, help="updates per turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    total = WARM_UP + (args.repeats + 1) * args.updates  # the last turn is never run
    packed = args.way in ("ours packed", "TRL packed")
    if args.way in ("ours", "ours packed"):
        ours(args.model, updates=args.updates, total=total, packed=packed)
    elif args.way:
        of_trl(args.model, updates=args.updates, total=total, packed=packed, threads=args.threads)
    ways = [way for way in WAYS if way.startswith("ours") or find_spec("trl")]
    if len(ways) == 2:
        print("TRL is not installed here: pip install trl")
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as model:
        start = [sys.executable, "-m", "rlvr_cli.models.tiny", model]
        subprocess.run(start, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        options = ["--model", model, "--updates", str(args.updates), "--repeats", str(args.repeats)]
        with workers(__file__, ways, options, threads=args.threads) as turns:
            for repeat in range(args.repeats):
                for way in ways if repeat % 2 == 0 else reversed(ways):
                    turn = turns[way]()
                    rates = {
                        "tokens/s": turn["tokens"] / turn["seconds"],
                        "responses": turn["responses"] / turn["seconds"],
                    }
                    found[way].append({**rates, "tokens": turn["tokens"] / args.updates})
    middle = {way: {n: statistics.median(r[n] for r in runs) for n in runs[0]} for way, runs in found.items()}
    for way, runs in found.items():
        of, span = middle[way], [run["tokens/s"] for run in runs]
        print(
            f"{way:<12}{of['tokens/s']:8,.0f} tokens/s ({min(span):,.0f} to {max(span):,.0f}), {of['responses']:8,.0f} of responses, "
            f"{of['tokens']:.0f} tokens an update; ours is {middle['ours']['tokens/s'] / of['tokens/s']:.2f} x"
        )
    pairs = {
        "padded by TRL": ("ours", "TRL"),
        "packed by TRL": ("ours", "TRL packed"),
        "packed by both": ("ours packed", "TRL packed"),
    }
    rows = [
        Row(
            "SFT",
            f"quickstart, {how}",
            f"TRL {version('trl')} SFTTrainer",
            "tokens/s",
            middle[mine]["tokens/s"],
            middle[its]["tokens/s"],
            ">= 1.5",
        )
        for how, (mine, its) in pairs.items()
        if its in middle
    ]
    write(args.json, rows)


if __name__ == "__main__":
    main()
