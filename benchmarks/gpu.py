"""A GRPO step of a 1.5B model on one GPU: sampling, training, memory, and the device's matrix rate. Under 10 minutes.

    python benchmarks/gpu.py                    # on a CUDA device; on the CPU at toy size
    python benchmarks/gpu.py --json rows.json

Enters: nothing; the model is Qwen2.5-1.5B's shape with random weights (28 layers, hidden 1,536, 12 heads over 2
key-value heads, vocabulary 151,936), which never ends a response. Leaves: one table.

What runs is `rlvr grpo` itself: 32 questions of about 150 tokens x 8 samples of 1,024 tokens, on-policy, in micro-
batches of 2 as in the preset cs336 (`--micro-batch-size 8` is faster), `--steps` steps of which the first is a warm-
up. A grader made for this benchmark rewards about half of the responses, so that groups have a signal. Training's
share of the matrix rate counts only the operations that the mathematics needs: 6 floating-point operations per weight
and token in the body, 6 per weight and response token in the output layer, and the attention products of the causal
half, but no recomputation.
"""

import argparse
import json
import random
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rows import Row, write

from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.commands import grpo
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.models.policy import Policy
from rlvr_cli.models.tiny import new_tokenizer
from rlvr_cli.runs.readers import read_rollouts, read_run

GPU = {"layers": 28, "hidden": 1536, "intermediate": 8960, "heads": 12, "kv_heads": 2, "vocabulary": 151_936}
TOY = {"layers": 2, "hidden": 128, "intermediate": 384, "heads": 4, "kv_heads": 2, "vocabulary": 2_048}
GRADER = """
import zlib

def grade(response, ground_truth):
    reward = float(zlib.crc32(response.encode()) & 1)
    return {"format_reward": 1.0, "answer_reward": reward, "reward": reward}
"""


def make_model(directory: Path, shape: dict[str, int], *, device: str) -> int:
    """Save a random model of that shape; return its number of parameters without the embedding."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = new_tokenizer(["What is 1 + 2?"])
    config = Qwen2Config(
        vocab_size=shape["vocabulary"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    Policy(model, tokenizer).save(directory)
    return sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()


def matrix_rate(device: str, dtype: torch.dtype, size: int) -> float:
    """Return the floating-point operations per second of a square matrix product, the median of ten."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(13):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        torch.mm(a, b)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(seconds[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="GRPO steps, including the first, which does not count")
    parser.add_argument(
        "--micro-batch-size", type=int, help="responses per forward pass; default: cs336's 2, on a CPU 32"
    )
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device, shape = ("cuda", GPU) if on_gpu else ("cpu", TOY)
    questions, samples, max_tokens = (32, 8, 1024) if on_gpu else (4, 8, 64)
    micro = arguments.micro_batch_size or (2 if on_gpu else 32)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        body = make_model(root / "model", shape, device=device)
        draw = random.Random(0)
        lines = [
            {"question": " + ".join(str(draw.randrange(10)) for _ in range(70)) + "?", "answer": "0"}
            for _ in range(4 * questions)
        ]
        (root / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (root / "grader.py").write_text(GRADER)
        rate = matrix_rate(device, torch.bfloat16 if on_gpu else torch.float32, 8192 if on_gpu else 1024)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        grpo.run(
            GrpoConfig(
                model=str(root / "model"),
                engine="transformers",
                dataset=str(root / "questions.jsonl"),
                question_field="question",
                answer_field="answer",
                grader=f"{root / 'grader.py'}:grade",
                runs_dir=str(root),
                run="r",
                n_grpo_steps=arguments.steps,
                rollout_batch_size=questions * samples,
                group_size=samples,
                train_batch_size=questions * samples,
                gradient_accumulation_steps=questions * samples // micro,
                sampling_max_tokens=max_tokens,
                checkpoint_every=0,
                eval_every=0,
            )
        )
        with open_runs([read_run(root / "r")]) as database:
            rows = database.select("select name, step, value from metrics where phase = 'train' and step > 0").rows
        lengths = read_rollouts(root / "r", phase="train", columns=["step", "num_prompt_tokens", "num_response_tokens"])
    metrics: dict[str, dict[int, float]] = {}
    for name, step, value in rows:
        metrics.setdefault(name, {})[step] = value
    shares = []
    for step, seconds in metrics["update/seconds"].items():
        of_step = [r for r in lengths.to_pylist() if r["step"] == step]
        needed = 0.0
        for row in of_step:
            total, response = row["num_prompt_tokens"] + row["num_response_tokens"], row["num_response_tokens"]
            attention = 6 * shape["layers"] * shape["hidden"] * total**2
            needed += 6 * body * total + 6 * shape["vocabulary"] * shape["hidden"] * response + attention
        shares.append(needed / seconds / rate)
    middle = {name: statistics.median(values.values()) for name, values in metrics.items()}
    work = f"{questions} questions x {samples} samples of {max_tokens} tokens, micro-batches of {micro}"
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    where = torch.cuda.get_device_name() if on_gpu else "CPU, toy size: no figure of a GPU"
    print(f"{where}; torch {torch.__version__}; {work}")

    def goal(text: str) -> str:
        return f" (goal {text})" if on_gpu else ""

    for what, value in (
        ("matrix rate", f"{rate / 1e12:,.2f} TFLOP/s"),
        ("embedded sampler", f"{middle['sampling/tokens_per_second']:,.0f} tokens/s{goal('20,000')}"),
        (
            "update",
            f"{middle['update/seconds']:.2f} s, {statistics.median(shares):.0%} of the matrix rate{goal('40%')}"
            if on_gpu
            else f"{middle['update/seconds']:.2f} s",
        ),
        ("whole step", f"{middle['step/seconds']:.2f} s{goal('15')}"),
        ("sampling, grading", f"{middle['sampling/seconds']:.2f} s, {middle['grading/seconds']:.2f} s"),
        ("peak memory", f"{peak / 2**30:.1f} GiB"),
        ("this benchmark", f"{time.perf_counter() - began:.0f} s"),
    ):
        print(f"{what:<18} {value}")
    if on_gpu:
        tokens, step = middle["sampling/tokens_per_second"], middle["step/seconds"]
        write(
            arguments.json,
            [
                Row("embedded sampler", f"1.5B, {work}", "the goal", "tokens/s", tokens, 20_000, ">= 1"),
                Row("GRPO step", f"1.5B, {work}", "the goal", "s", step, 15, "<= 1"),
                Row("training", f"1.5B, {work}", "the matrix rate", "share", statistics.median(shares), 1, ">= 0.4"),
            ],
        )
    else:
        write(arguments.json, [])


if __name__ == "__main__":
    main()
