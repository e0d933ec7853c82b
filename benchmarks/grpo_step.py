"""Wall seconds of one GRPO step, compared with TRL's GRPOTrainer.

    python benchmarks/grpo_step.py [--steps 6] [--repeats 5] [--threads 1] [--json FILE]
    python benchmarks/grpo_step.py --sizes 0.4M 25M 100M [--questions-file gsm8k/train.jsonl] --steps 2 --repeats 1

The quickstart's GRPO on both sides, on a CPU: the built-in model, the questions, prompt and reward of `rlvr grpo
--preset quickstart`, 32 questions x 8 samples of up to 64 tokens at temperature 1, one on-policy update (TRL's in 4
micro-batches of 64, which suits it best), advantages divided by the group's standard deviation, loss averaged over each response, AdamW at
3e-4. Each repeat starts one process per way, from the same weights. The first step of each is left out; then they take
turns, one step each while the others wait, in an order that is reversed every second step, so that a change of the
machine's speed affects all of them. The result is the median over repeats of each repeat's median step.

ours   `rlvr grpo` itself, with its store, grading processes, weight check, metrics, alarms and display: from one check
       whether there is time for a step to the next. The evaluation before training falls into the step that is left
       out. The checkpoint of every 20th step, 0.2 % of the time, is included only from --steps 20 on.
TRL    from the end of one step to the end of the next, generation included, in the settings that suit it best here:
       transformers.generate with a dynamic cache, no gradient checkpointing, float32, no reference model, no
       checkpoints, metrics logged every 10th step, no progress bar, our reward function called in its process.

TRL cannot end a response at a string (transformers needs the tokenizer for `stop_strings`, and TRL does not pass it
on), so its rows go on to EOS. The built-in model's EOS directly follows `</answer>`, so that is one more token; "to
EOS" is ours without the stop string, so that both do the same.

With --sizes, how the step grows: random models of these sizes with the built-in model's tokenizer, 8 questions x 8 samples of
exactly 64 tokens, one micro-batch, the rest as above. The reward is a hash of the response, so that every group has a signal.
The prompts are the quickstart's short ones (15 tokens) and, with --questions-file, GSM8K's in r1_zero (about 140 and more).
Memory is the most that the process has had resident, its grading processes not counted.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from rows import Row, write

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "rlvr_cli" / "assets" / "tiny-math"
PRESET = ROOT / "rlvr_cli" / "config" / "presets" / "quickstart.toml"
WAYS = ("ours", "ours to EOS", "TRL")
TURN = "turn "
SIZES = {  # layers, hidden, intermediate, heads, key-value heads
    "0.4M": (2, 128, 384, 4, 2),
    "1M": (3, 192, 576, 4, 2),
    "25M": (8, 512, 1536, 8, 2),
    "100M": (14, 768, 2304, 12, 4),
}
GRID = {"group_size": 8, "train_batch_size": 64, "gradient_accumulation_steps": 1, "sampling_max_tokens": 64}
GRID |= {"compute_dtype": "float32"}  # as TRL's
GRADER = """
import zlib

def grade(response, ground_truth):
    reward = zlib.crc32(response.encode()) / 2**32
    return {"format_reward": 1.0, "answer_reward": reward, "reward": reward}
"""


def wait_for_turn(**found: float) -> None:
    """In a worker: print the results of the last turn, and wait for the next one; if there is none, end the process."""
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MB, the most so far
    print(TURN + json.dumps(found), flush=True)
    if not sys.stdin.readline():
        os._exit(0)


@contextmanager
def workers(script: str, ways: list[str], options: list[str], *, threads: int) -> Iterator[dict[str, Any]]:
    """Start one warm, waiting process per way; yield a function for each that runs a turn and returns its results."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    processes: list[subprocess.Popen[str]] = []

    def start(way: str) -> Callable[[], dict[str, float]]:
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the process)
        command = [sys.executable, script, "--way", way, "--threads", str(threads), *options]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment)
        processes.append(process)

        def found() -> dict[str, float]:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(TURN):
                    return json.loads(line.removeprefix(TURN))
            errors.seek(0)
            raise SystemExit(f"{way} ended:\n{errors.read()[-3000:]}")

        def turn() -> dict[str, float]:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return found()

        found()  # wait until it is warm
        return turn

    try:
        yield {way: start(way) for way in ways}
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def shape_of(size: str, tokenizer: Any) -> dict[str, Any]:
    """Return the configuration of a model of this size, as transformers' Qwen configurations take it."""
    layers, hidden, intermediate, heads, kv_heads = SIZES[size]
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def make_model(directory: Path, size: str) -> None:
    """Save a random model of this size with the built-in model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from rlvr_cli.models.policy import Policy

    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    config = Qwen2Config(**shape_of(size, tokenizer))
    torch.manual_seed(0)
    Policy(Qwen2ForCausalLM(config), tokenizer).save(directory)
    (directory.parent / "grader.py").write_text(GRADER)


def grid_flags(model: Path, questions: str) -> dict[str, Any]:
    """Return the options of `rlvr grpo` for a cell of the grid."""
    flags: dict[str, Any] = {**GRID, "rollout_batch_size": 64, "sampling_min_tokens": 64, "checkpoint_every": 0}
    flags |= {"model": str(model), "grader": f"{model.parent / 'grader.py'}:grade", "prompt": "r1_zero"}
    if questions:
        flags |= {"dataset": questions, "question_field": "question", "answer_field": "answer"}
    return flags


def ours(*, stop: str, more: dict[str, Any]) -> NoReturn:
    """Run `rlvr grpo`; each turn gives the seconds, CPU seconds, sampled tokens and mean reward of a step."""
    flags = {"model": str(MODEL), "stop": (stop,)} | more
    train_with_ours(flags, lambda batch: {name: batch.signals[name] for name in ("tokens", "reward")})


def train_with_ours(flags: dict[str, Any], figures: Callable[[Any], dict[str, float]]) -> NoReturn:
    """Run `rlvr grpo --preset quickstart` with these options; each turn gives a step's seconds and CPU seconds and its batch's figures."""
    from rlvr_cli.commands import grpo
    from rlvr_cli.commands.sources.plain import Plain
    from rlvr_cli.config.grpo import GrpoConfig
    from rlvr_cli.config.parsing.sources import resolve
    from rlvr_cli.training.trainer import Trainer

    has_time, next_batch = Trainer.has_time, Plain.next_batch
    begun = used = 0.0
    step: dict[str, float] = {}

    def timed(self: Trainer, **how: Any) -> bool:
        nonlocal begun, used
        if step:
            wait_for_turn(seconds=time.perf_counter() - begun, cpu=time.process_time() - used, **step)
        begun, used = time.perf_counter(), time.process_time()
        return has_time(self, **how)

    def watched(self: Plain, place: Any) -> Any:
        batch = next_batch(self, place)
        step.update(figures(batch))
        return batch

    # The clock is put around the two methods with which a step begins and ends: the product has none of its own.
    Trainer.has_time, Plain.next_batch = timed, watched  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as runs:
        flags = {"preset": "quickstart", "runs_dir": runs, "eval_every": 0, "eval_examples": 1} | flags
        grpo.run(resolve(GrpoConfig, flags={"n_grpo_steps": 10_000} | flags, command="grpo"))
    raise AssertionError("unreachable: the process ends after its last turn")


def preset_with(more: dict[str, Any]) -> dict[str, Any]:
    """Return the options of quickstart's GRPO with these, for TRL."""
    given = {"model": str(MODEL), "gradient_accumulation_steps": 4}
    return tomllib.loads(PRESET.read_text())["grpo"] | given | more


def of_trl(*, threads: int, more: dict[str, Any]) -> NoReturn:
    """Run TRL's trainer on the same questions; each turn gives the same."""
    from rlvr_cli.data.datasets import load_dataset
    from rlvr_cli.data.prompts import load_prompt, prompt_of
    from rlvr_cli.graders.r1_zero import r1_zero_reward_fn

    preset, template = preset_with(more), load_prompt("r1_zero")
    fields = {name: preset[name] for name in ("question_field", "answer_field") if name in preset}
    examples = load_dataset(preset["dataset"], purpose="train", **fields).examples
    rows = [{"prompt": prompt_of(e, template), "ground_truth": e.ground_truth} for e in examples]
    step: dict[str, float] = {}

    def reward(completions: list[str], completion_ids: list[Any], ground_truth: list[Any], **_: Any) -> list[float]:
        pairs = zip(completions, ground_truth, strict=True)
        if more:
            given = [zlib.crc32(text.encode()) / 2**32 for text in completions]
        else:
            given = [r1_zero_reward_fn(text, truth)["reward"] for text, truth in pairs]
        step.update(tokens=float(sum(map(len, completion_ids))), reward=statistics.mean(given))
        return given

    settings = {"generation_kwargs": {"min_new_tokens": preset["sampling_min_tokens"]}} if more else {}
    train_with_trl(preset, rows, reward, step, threads=threads, settings=settings)


def train_with_trl(
    preset: dict[str, Any],
    rows: list[dict[str, Any]],
    reward: Callable[..., list[float]],
    step: dict[str, float],
    *,
    threads: int,
    settings: dict[str, Any],
    **more: Any,
) -> NoReturn:
    """Run TRL's trainer with the options of `preset`; each turn gives the seconds of a step and what `reward` put into `step`.

    Args:
        settings: more of GRPOConfig.
        more: of GRPOTrainer.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]  # no dependency of ours

    import datasets

    torch.set_num_threads(threads)
    model, begun = preset["model"], 0.0

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            nonlocal begun
            wait_for_turn(seconds=time.perf_counter() - begun, **step)
            begun = time.perf_counter()

    with tempfile.TemporaryDirectory() as directory:
        micro_batches = preset["gradient_accumulation_steps"]
        config = GRPOConfig(
            output_dir=directory,
            max_steps=10_000,
            per_device_train_batch_size=preset["train_batch_size"] // micro_batches,
            gradient_accumulation_steps=micro_batches,
            num_generations=preset["group_size"],
            max_completion_length=preset["sampling_max_tokens"],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            learning_rate=preset["learning_rate"],
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=preset["warmup_steps"],
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            loss_type="grpo",
            scale_rewards="group",
            use_vllm=False,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to="none",
            logging_steps=10,
            disable_tqdm=True,
            seed=0,
            **settings,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True),
            reward_funcs=reward,
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(model, local_files_only=True),
            callbacks=[Clock()],
            **more,
        )
        trainer.train()
    raise AssertionError("unreachable: the process ends after its last turn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="measured steps per process")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="random models instead of the built-in one")
    parser.add_argument("--questions-file", help="with --sizes: GSM8K's train.jsonl, for its prompts too")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--cell", default="{}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    more = json.loads(args.cell)
    if args.way == "TRL":
        of_trl(threads=args.threads, more=more)
    elif args.way:
        ours(stop="" if args.way == "ours to EOS" else "</answer>", more=more)
    ways = [way for way in WAYS if way != "TRL" or find_spec("trl")]
    if "TRL" not in ways:
        print("TRL is not installed here: pip install trl")
    if not args.sizes:
        middle = measure(ways, [], args)
        works = (("ours", "quickstart", "quickstart"), ("ours to EOS", "quickstart, both to EOS", ""))
        return write(args.json, compared(middle, works, goal="<= 0.33"))
    rows = []
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as temporary:
            make_model(Path(temporary) / "model", size)
            for name, questions in {"short prompts": "", "GSM8K's prompts": args.questions_file or ""}.items():
                if name != "short prompts" and not questions:
                    continue
                print(f"{size} parameters, {name}", flush=True)
                flags = json.dumps(grid_flags(Path(temporary) / "model", questions))
                middle = measure([way for way in ways if way != "ours"], ["--cell", flags], args)
                work = f"{size} parameters, {name}, 64 responses of 64 tokens"
                works = (("ours to EOS", work, f"{size}, {name}"),)
                rows += compared(middle, works, goal="<= 0.25" if questions else "<= 0.6")
    return write(args.json, rows)


def measure(ways: list[str], options: list[str], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the median of each figure by way, and print them."""
    medians = in_turns(__file__, ways, options, args)
    middle = medians_of(medians)
    for way, of in middle.items():
        print(
            f"{said_of(way, medians)}; {of['tokens']:,.0f} tokens sampled, reward {of['reward']:.2f}, "
            f"{of['memory']:,.0f} MB at most",
            flush=True,
        )
    return middle


def in_turns(
    script: str, ways: list[str], options: list[str], args: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    """Let the ways of the script take turns; return each figure's median over the steps, for each way and repeat."""
    medians: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(args.repeats):
        steps: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        with workers(script, ways, options, threads=args.threads) as turns:
            for number in range(args.steps):
                for way in ways if number % 2 == 0 else reversed(ways):
                    steps[way].append(turns[way]())
        for way, found in steps.items():
            medians[way].append(_medians(found))
    return medians


def medians_of(medians: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the median of each figure over the repeats, by way."""
    return {way: _medians(found) for way, found in medians.items()}


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def said_of(way: str, medians: dict[str, list[dict[str, float]]]) -> str:
    """A way's seconds, their span over the repeats, and their share of TRL's."""
    middle, span = medians_of(medians), [found["seconds"] for found in medians[way]]
    seconds = middle[way]["seconds"]
    ratio = f", {seconds / middle['TRL']['seconds']:.3f} of TRL" if "TRL" in middle else ""
    return f"{way:<12} {seconds:.3f} s a step ({min(span):.3f} to {max(span):.3f}){ratio}"


def compared(middle: dict[str, dict[str, float]], works: Iterable[tuple[str, str, str]], *, goal: str) -> list[Row]:
    """Return a row for each way, its work and its cell of the tables; none without TRL."""
    if "TRL" not in middle:
        return []
    beside = f"TRL {version('trl')} GRPOTrainer"
    return [
        Row(what, work, beside, unit, middle[way][name], middle["TRL"][name], aim, cell)
        for way, work, cell in works
        for what, unit, name, aim in (
            ("GRPO step, wall", "s", "seconds", goal),
            ("GRPO step, memory of the process", "MB", "memory", "<= 1"),
        )
    ]


if __name__ == "__main__":
    main()
