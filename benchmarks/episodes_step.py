"""Wall seconds of one GRPO step whose episodes call a tool, compared with TRL's GRPOTrainer(tools=[...]) and with vLLM as the engine.

    python benchmarks/episodes_step.py [--sizes 0.4M 25M] [--steps 3] [--repeats 3] [--models FOLDER]

TRL and vLLM take part where they are installed.

Both sides train the same chat model on the questions of `multiplication` with the tool `calc`: 8 questions x 8 episodes of at
most 3 turns and 128 tokens, what the tool says included, in 2 micro-batches of 32, temperature 1, float32, one thread, AdamW
at 1e-5. How the ways take turns, what a step is, and how TRL is configured: `grpo_step.py`.

The model is a Qwen3 of `grpo_step.py`'s sizes with the chat template of Qwen2.5, which TRL takes as it is, and a tokenizer made
for these conversations: the prompt, with the tool's description, has some 200 tokens. So that there is something to answer,
`rlvr sft --chat` first teaches it traces of which nine in ten call the tool once and then give the answer; what is taught is
when to call and how, so the numbers may be wrong. Both sides start from these weights, and the learning rate is low
enough to leave them nearly so. --models keeps the trained models, and takes those that are there.

The reward is a hash of the last turn, so that every group has a signal and no side may leave a row out. What was done is
printed for both: turns, calls and tokens per episode, and the share of episodes that ran out of tokens.

ours   plays with the embedded sampler: an episode whose tool has answered joins the running batch, as a rule with its cache.
vLLM   is ours with `--engine vllm`, in the trainer's process: there too, an episode whose tool has answered joins the running batch.
TRL    plays each turn of all episodes with transformers.generate from the whole conversation so far, and calls the tool
       in its process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zlib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any, NoReturn

from grpo_step import (
    GRADER,
    ROOT,
    SIZES,
    in_turns,
    medians_of,
    preset_with,
    said_of,
    shape_of,
    train_with_ours,
    train_with_trl,
)
from rows import Row, write

from rlvr_cli.data.synthetic import multiplication
from rlvr_cli.types import Example

WAYS = {"ours": "rlvr_cli", "vLLM": "vllm", "TRL": "trl"}  # and the package that each needs
GOAL = 0.4  # of TRL's time
TEMPLATE = ROOT / "tests" / "fixtures" / "chat_templates" / "qwen2_5.jinja"
ENDS, PLAIN = ("<|im_end|>", "<|endoftext|>"), ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CALLING = 0.9  # of the traces
UPDATES = {"0.4M": 400, "25M": 80, "100M": 60}  # until nearly every call can be read
CHAT: dict[str, Any] = {"chat": True, "environment": "calculator", "prompt": "question_only"}
STEP = {
    **CHAT,
    "dataset": "multiplication:6000:1",
    "stop": ("",),
    "rollout_batch_size": 64,
    "group_size": 8,
    "train_batch_size": 64,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-5,
    "sampling_max_tokens": 128,
    "sampling_min_tokens": 0,
    "max_episode_tokens": 128,
    "max_turns": 3,
    "checkpoint_every": 0,
    "compute_dtype": "float32",  # as TRL's and vLLM's
}


def calculator() -> Any:
    """The tool as TRL knows it, with the name by which the policy calls it."""
    from rlvr_cli.environments.calculator import NAME, calculate

    calculate.__name__ = NAME
    return calculate


def conversation(example: Example) -> dict[str, Any]:
    """Return a trace of multiplication as messages: the call and its result, if it has them, and the answer."""
    expression = example.question.removeprefix("What is ").removesuffix("?")
    call = {"type": "function", "function": {"name": "calc", "arguments": {"expression": expression}}}
    called = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": example.ground_truth}]
    asked, said = {"role": "user", "content": example.question}, f"It is {example.ground_truth}."
    between = called if len(example.turns or ()) > 1 else []
    return {"messages": [asked, *between, {"role": "assistant", "content": said}]}


def make_model(directory: Path, size: str, traces: list[str]) -> None:
    """Save a random Qwen3 of this size and a tokenizer made for the traces."""
    import torch
    from transformers import AddedToken, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.chat_template_utils import get_json_schema

    from rlvr_cli.models.policy import Policy
    from rlvr_cli.models.tiny import new_tokenizer

    template = TEMPLATE.read_text()
    texts = [json.dumps(get_json_schema(calculator())), template, *traces]
    tokenizer: Any = new_tokenizer(texts, vocab_size=2048, min_share=len(texts))  # no phrase is a token
    end, pad = ENDS
    tokenizer.add_special_tokens({"eos_token": end, "pad_token": pad, "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    tokenizer.chat_template = template
    shape = shape_of(size, tokenizer)
    config = Qwen3Config(**shape, head_dim=shape["hidden_size"] // shape["num_attention_heads"])
    torch.manual_seed(0)
    Policy(Qwen3ForCausalLM(config), tokenizer).save(directory)


def teach(folder: Path, size: str) -> Path:
    """Return the model of this size that calls the tool, made and trained unless the folder has it."""
    run = folder / size
    if (run / "model").is_dir():
        return run / "model"
    start, file = folder / f"{size}-random", folder / "traces.jsonl"
    traces = [json.dumps(conversation(example)) for example in multiplication(6000, tool_share=CALLING)]
    folder.mkdir(parents=True, exist_ok=True)
    make_model(start, size, traces)
    file.write_text("\n".join(traces))
    options = {
        "model": start, "dataset": file, "eval-dataset": "multiplication:64", "environment": CHAT["environment"],
        "prompt": CHAT["prompt"], "n-sft-steps": UPDATES[size], "train-batch-size": 16, "micro-batch-size": 16,
        "learning-rate": 2e-3 if size == "0.4M" else 1e-3, "warmup-steps": 10, "lr-schedule": "cosine", "eval-every": 0,
        "eval-examples": 1, "sampling-max-tokens": 64, "checkpoint-every": 0, "runs-dir": folder, "run": size,
        "compute-dtype": "float32",
    }  # fmt: skip
    command = [sys.executable, "-m", "rlvr_cli", "sft", "--chat"]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return run / "model"


def of_trl(preset: dict[str, Any], *, threads: int) -> NoReturn:
    """Run TRL's trainer; each turn gives what ours does."""
    from rlvr_cli.data.datasets import load_dataset
    from rlvr_cli.data.prompts import load_prompt, prompt_of

    step: dict[str, float] = {}
    template = load_prompt(preset["prompt"])
    examples = load_dataset(preset["dataset"], purpose="train").examples
    rows = [{"prompt": [{"role": "user", "content": prompt_of(e, template)}]} for e in examples]

    def reward(completions: list[Any], completion_ids: list[Any], **_: Any) -> list[float]:
        roles = [[message["role"] for message in messages] for messages in completions]
        turns = [of.count("assistant") for of in roles]
        step.update(
            turns=mean(turns),
            calls=mean(of.count("tool") for of in roles),
            length=mean(map(len, completion_ids)),
            cut=mean(len(ids) >= preset["max_episode_tokens"] for ids in completion_ids),
        )
        return [zlib.crc32(str(messages[-1]["content"]).encode()) / 2**32 for messages in completions]

    settings = {"max_tool_calling_iterations": preset["max_turns"] - 1}
    train_with_trl(preset, rows, reward, step, threads=threads, settings=settings, tools=[calculator()])


def of_batch(batch: Any) -> dict[str, float]:
    """Return the figures of the episodes of a batch."""
    rows = batch.rollouts
    return {
        "turns": mean(row.episode.num_turns for row in rows),
        "calls": mean(row.episode.tool_calls for row in rows),
        "length": mean(row.num_response_tokens for row in rows),
        "cut": mean(row.finish_reason == "length" for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.4M", "25M"])
    parser.add_argument("--steps", type=int, default=3, help="measured steps per process")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--models", type=Path, help="where the trained models are kept")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    preset = STEP | {"model": args.model, "grader": f"{args.model}/../grader.py:grade"}
    if args.way == "TRL":
        of_trl(preset_with(preset), threads=args.threads)
    elif args.way:
        train_with_ours(preset | ({"engine": "vllm"} if args.way == "vLLM" else {}), of_batch)
    ways = [way for way, package in WAYS.items() if find_spec(package)]
    print(f"installed here: {', '.join(ways)}")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for size in args.sizes:
            model = teach((args.models or Path(temporary)).absolute(), size)
            (model.parent / "grader.py").write_text(GRADER)
            medians = in_turns(__file__, ways, ["--model", str(model)], args)
            middle = medians_of(medians)
            print(f"{size}:")
            for way, of in middle.items():
                print(
                    f"{said_of(way, medians)}; an episode: {of['turns']:.2f} turns, {of['calls']:.2f} calls, "
                    f"{of['length']:.1f} tokens, {of['cut']:.2f} cut off; {of['memory']:,.0f} MB at most",
                    flush=True,
                )
            rows += rows_of(size, middle)
    for row in rows:
        verdict = f", goal {row.goal}: {'missed' if row.missed else 'reached'}" if row.goal else ""
        print(f"{row.cell}, {row.what}: {row.ratio:.2f} of that of {row.beside}{verdict}")
    write(args.json, rows)


def rows_of(size: str, middle: dict[str, dict[str, float]]) -> list[Row]:
    """A row for the seconds of a step and one for its memory, beside each of the others."""
    ours, names = middle["ours"], {"vLLM": "rlvr with vLLM, in process"}
    if "TRL" in middle:
        names["TRL"] = f"TRL {version('trl')} GRPOTrainer"
    goals = {("TRL", "seconds"): f"<= {GOAL}"}
    return [
        Row(
            what, "64 episodes", names[way], unit, ours[name], theirs[name], goals.get((way, name), ""), size,
            f"{ours['turns']:.2f} turns, {ours['length']:.1f} tokens; {theirs['turns']:.2f}, {theirs['length']:.1f}",
        )
        for way, theirs in middle.items()
        if way != "ours"
        for what, unit, name in (("step with a tool, wall", "s", "seconds"), ("step with a tool, memory", "MB", "memory"))
    ]  # fmt: skip


if __name__ == "__main__":
    main()
