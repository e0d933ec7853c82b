"""Tokens per second of the embedded sampler beside `transformers.generate` and, where it is installed, vLLM.

    python benchmarks/sampling.py [--model PATH] [--questions 64] [--samples 4] [--max-tokens 128] [--repeats 3]

The same model, prompts, number of samples and precision for each; temperature 1, full softmax. Two workloads:

  fixed    every response has exactly --max-tokens tokens (EOS is barred): the cost of a token, nothing else
  natural  responses end at EOS: what leaving and refilling the batch is worth

The engines take turns within a repeat, in an order that is reversed every second repeat, so that a change of the
machine's speed hits all alike; the median over repeats is given, and its ratio to `generate`. Only response tokens up
to EOS count. Our sampler also keeps log-probabilities and entropies, which `generate` here does not. Weight loading is
not timed and every engine has one untimed batch first.

Without --model: the built-in tiny model if there is one, else a random Qwen2 of 0.85 million parameters with so many
EOS tokens that natural responses have about a third of --max-tokens tokens. Use one thread (--threads 1, the
default) on a machine that does anything else. A prefix cache gives vLLM an advantage here: it meets the same prompts in
every repeat.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlvr_cli.records import Request, SamplingParams
from rlvr_cli.samplers.transformers import TransformersSampler

BUILTIN = Path(__file__).parents[1] / "rlvr_cli" / "assets" / "tiny-math"


def questions(count: int) -> list[str]:
    """Word problems of about 20 to 70 words."""
    opening = "A conversation between a user and an assistant. The assistant thinks first and then answers.\nUser: "
    story = "A baker has {a} loaves and sells {b} of them at {c} coins each. "
    return [
        opening
        + "".join(story.format(a=20 + i + j, b=3 + i % 7, c=1 + j) for j in range(1 + i % 4))
        + "How many are left?"
        for i in range(count)
    ]


def random_model(directory: Path, max_tokens: int) -> None:
    """Save the model that stands in where there is none; see above."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=["<eos>", "<pad>"], initial_alphabet=alphabet)
    bpe.train_from_iterator(questions(64), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>")
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    endings = range(
        max(1, round(3 * config.vocab_size / max_tokens))
    )  # a random model's tokens are about equally likely
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *(config.vocab_size - 1 - i for i in endings)]
    model.save_pretrained(directory)


def with_ours(model: Any, tokenizer: Any, args: argparse.Namespace) -> Callable[[bool, int], int]:
    sampler = TransformersSampler(model, tokenizer, max_batch_size=args.batch)

    def run(fixed: bool, repeat: int) -> int:
        requests = [
            Request(prompt, tuple(1_000_003 * (repeat * args.questions + i) + j for j in range(args.samples)))
            for i, prompt in enumerate(questions(args.questions))
        ]
        params = SamplingParams(max_tokens=args.max_tokens, min_tokens=args.max_tokens if fixed else 0, stop=())
        return sum(completion.num_tokens for completion in sampler.sample(requests, params))

    return run


def with_generate(model: Any, tokenizer: Any, args: argparse.Namespace) -> Callable[[bool, int], int]:
    tokenizer.padding_side = "left"
    inputs = tokenizer(questions(args.questions), return_tensors="pt", padding=True).to(model.device)
    length = inputs["input_ids"].shape[1]
    eos = model.generation_config.eos_token_id
    eos = torch.tensor(eos if isinstance(eos, list) else [eos], device=model.device)

    def run(fixed: bool, repeat: int) -> int:
        out = model.generate(
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=args.samples,
            max_new_tokens=args.max_tokens,
            min_new_tokens=args.max_tokens if fixed else None,
        )[:, length:]
        ended = torch.isin(out, eos).cumsum(1)
        return int(((ended == 0) | ((ended == 1) & torch.isin(out, eos))).sum())

    return run


def with_vllm(path: str, args: argparse.Namespace) -> Callable[[bool, int], int] | None:
    try:
        from vllm import LLM
        from vllm import SamplingParams as VllmParams
    except ImportError:
        return None
    engine = LLM(
        model=path,
        dtype="float32" if not torch.cuda.is_available() else "auto",
        max_model_len=2048,
        enforce_eager=not torch.cuda.is_available(),
        gpu_memory_utilization=0.3,
        logprobs_mode="processed_logprobs",
        seed=0,
    )

    def run(fixed: bool, repeat: int) -> int:
        params = VllmParams(
            n=args.samples,
            temperature=1.0,
            max_tokens=args.max_tokens,
            min_tokens=args.max_tokens if fixed else 0,
            logprobs=0,
        )
        outputs = engine.generate(questions(args.questions), params, use_tqdm=False)
        return sum(len(answer.token_ids) for output in outputs for answer in output.outputs)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a directory that transformers can load")
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4, help="per question")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=None, help="our max_batch_size")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    with tempfile.TemporaryDirectory() as temporary:
        path = args.model or (str(BUILTIN) if (BUILTIN / "config.json").exists() else temporary)
        if path == temporary:
            random_model(Path(temporary), args.max_tokens)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, args.dtype), local_files_only=True
        ).eval()
        if torch.cuda.is_available():
            model.to("cuda")
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        engines = {"ours": with_ours(model, tokenizer, args), "generate": with_generate(model, tokenizer, args)}
        if (vllm := with_vllm(path, args)) is not None:
            engines["vllm"] = vllm

        name = "random 0.85M Qwen2" if path == temporary else path
        print(f"{name}: {args.questions} questions x {args.samples} samples, up to {args.max_tokens} tokens")
        for fixed in (True, False):
            rates: dict[str, list[float]] = {engine: [] for engine in engines}
            for repeat in range(-1, args.repeats):
                for engine in list(engines) if repeat % 2 == 0 else reversed(engines):
                    began = time.perf_counter()
                    tokens = engines[engine](fixed, repeat + 1)
                    if repeat >= 0:
                        rates[engine].append(tokens / (time.perf_counter() - began))
            base = statistics.median(rates["generate"])
            for engine, values in rates.items():
                middle = statistics.median(values)
                spread = f"{min(values):,.0f} to {max(values):,.0f}"
                workload = "fixed" if fixed else "natural"
                print(f"{workload:8} {engine:9} {middle:10,.0f} tokens/s  {middle / base:5.2f} x generate  ({spread})")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
