"""Tokens per second of the embedded sampler compared with `transformers.generate` and, if installed, vLLM.

    python benchmarks/sampling.py [--questions-file FILE] [--repeats 5] [--json FILE]
    python benchmarks/sampling.py --sizes 0.4M 25M 100M [--questions-file FILE] --repeats 2

The same model, prompts, number of samples and precision for each; temperature 1, full softmax. Three workloads:

  fixed    a random Qwen2 of 0.85 million parameters, 64 questions x 4 samples x 128 tokens each (EOS is barred):
           measures only the cost of a token. The questions are those of FILE (any data set that `rlvr eval` reads, such
           as GSM8K's test.jsonl), or word problems made here.
  ragged   the first batch of quickstart's GRPO: the built-in model, 32 questions x 8 samples of 4 to 64 tokens, which
           end after `</answer>` or EOS: measures the gain from rows that leave the batch early. Four batches per turn.
  eval     a model as in fixed, 256 questions in r1_zero's template x 1 sample x 64 tokens: measures prompts.

With --sizes, the grid of `grpo_step.py` instead: its random models, 8 questions x 8 samples of exactly 64 tokens, after short
prompts and, with --questions-file, after those questions in r1_zero.

The engines take turns within a repeat, in an order that is reversed every second repeat, so that a change of the
machine's speed affects all of them; the results are the median over repeats and its ratio to ours. Only response tokens
count. Our sampler also keeps log-probabilities and entropies, vLLM log-probabilities, `generate` here neither. Loading
of weights is not timed, and every engine first runs one untimed batch. The prefix cache gives vLLM an advantage here:
it sees the same prompts in every repeat.

All engines use OMP_NUM_THREADS threads, one by default: operators this small gain little from a second thread, and lose
much if anything else uses the core.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: vLLM's kernels read nothing else
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from grpo_step import SIZES, make_model
from rows import Row, write

from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.data.prompts import load_prompt, prompt_of
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.models.load import load_policy
from rlvr_cli.rollouts.requests import common_prefix
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.types import Request, SamplingParams

GOALS = {"generate": ">= 3", "vllm": ">= 1.5"}
WHAT = {"ragged": "embedded sampler, ragged lengths", "eval": "embedded sampler, one sample a question"}
NAMES = {"generate": "transformers.generate", "vllm": "vLLM, in process"}


@dataclass(frozen=True)
class Workload:
    """The work of every engine."""

    name: str
    work: str  # in words
    model: str  # a directory
    prompts: Sequence[str]
    samples: int  # per prompt
    params: SamplingParams
    cell: str = ""  # see `rows.Row`
    batches: int = 1  # per turn of an engine, so that a turn is long enough to be timed


def word_problems(count: int) -> list[str]:
    """Questions of about 20 to 70 words."""
    story = "A baker has {a} loaves and sells {b} of them at {c} coins each. "
    return [
        "".join(story.format(a=20 + i + j, b=3 + i % 7, c=1 + j) for j in range(1 + i % 4)) + "How many are left?"
        for i in range(count)
    ]


def random_model(directory: str, corpus: Sequence[str]) -> None:
    """Save a random Qwen2 of 0.85 million parameters, and a tokenizer made for the corpus."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=0,  # the first of the tokenizer's
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)


def with_ours(work: Workload) -> Callable[[int], int]:
    sampler, common = TransformersSampler(load_policy(work.model)), common_prefix(work.prompts)

    def run(repeat: int) -> int:
        first = repeat * len(work.prompts)
        requests = [
            Request(prompt, tuple(1_000_003 * (first + i) + j for j in range(work.samples)), common_prefix=common)
            for i, prompt in enumerate(work.prompts)
        ]
        return sum(completion.num_tokens for completion in sampler.sample(requests, work.params))

    return run


def with_generate(work: Workload) -> Callable[[int], int]:
    policy = load_policy(work.model)
    model, tokenizer = policy.model, policy.tokenizer
    tokenizer.padding_side = "left"
    inputs = tokenizer(list(work.prompts), return_tensors="pt", padding=True).to(model.device)
    length = inputs["input_ids"].shape[1]
    stop = {"stop_strings": list(work.params.stop), "tokenizer": tokenizer} if work.params.stop else {}

    def run(repeat: int) -> int:
        out = model.generate(
            **inputs,
            **stop,
            do_sample=True,
            temperature=work.params.temperature,
            top_k=0,
            top_p=1.0,
            num_return_sequences=work.samples,
            max_new_tokens=work.params.max_tokens,
            min_new_tokens=work.params.min_tokens,
        )[:, length:]
        return int((out != tokenizer.pad_token_id).sum())  # a response is padded with EOS after its end

    return run


def with_vllm(work: Workload) -> Callable[[int], int] | None:
    try:
        from vllm.entrypoints.llm import LLM
        from vllm.sampling_params import SamplingParams as VllmParams
    except ImportError:
        return None
    cuda = torch.cuda.is_available()
    engine = LLM(
        model=work.model,
        dtype="auto" if cuda else "float32",
        max_model_len=1024,
        enforce_eager=not cuda,
        kv_cache_memory_bytes=2**30,  # a share of the memory would have to leave room for the first workload's engine
        logprobs_mode="processed_logprobs",
        seed=0,
    )
    params = VllmParams(
        n=work.samples,
        temperature=work.params.temperature,
        max_tokens=work.params.max_tokens,
        min_tokens=work.params.min_tokens,
        stop=list(work.params.stop),
        include_stop_str_in_output=True,
        logprobs=0,
    )

    def run(repeat: int) -> int:
        outputs = engine.generate(list(work.prompts), params, use_tqdm=False)
        return sum(len(answer.token_ids) for output in outputs for answer in output.outputs)

    return run


def rows_of(work: Workload, *, repeats: int) -> list[Row]:
    """Time every engine on one workload, and print the results."""
    made = {"ours": with_ours(work), "generate": with_generate(work), "vllm": with_vllm(work)}
    engines = {name: engine for name, engine in made.items() if engine is not None}
    print(f"{work.name}: {work.work}; {torch.get_num_threads()} torch thread(s)")
    rates: dict[str, list[float]] = {name: [] for name in engines}
    lengths: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(-1, repeats):
        for name in list(engines) if repeat % 2 == 0 else reversed(engines):
            began = time.perf_counter()
            tokens = sum(engines[name]((repeat + 1) * work.batches + batch) for batch in range(work.batches))
            if repeat >= 0:
                rates[name].append(tokens / (time.perf_counter() - began))
                lengths[name].append(tokens / (len(work.prompts) * work.samples * work.batches))
    ours = statistics.median(rates["ours"])
    rows = []
    for name, values in rates.items():
        middle, length = statistics.median(values), statistics.mean(lengths[name])
        spread = f"({min(values):,.0f} to {max(values):,.0f}; {length:.1f} tokens a response)"
        beside = "" if name == "ours" else f"ours is {ours / middle:.2f} x that"
        print(f"  {name:9} {middle:9,.0f} tokens/s  {beside:22} {spread}")
        if name != "ours":
            what = WHAT.get(work.name, "embedded sampler")
            rows.append(Row(what, work.work, NAMES[name], "tokens/s", ours, middle, GOALS[name], work.cell))
    if "vllm" not in engines:
        print("  vLLM is not installed: its rows are left out")
    sys.stdout.flush()
    return rows


def grid(sizes: Sequence[str], questions_file: str | None, *, repeats: int) -> list[Row]:
    """The rows of `grpo_step.py`'s models and prompts."""
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder) / "model", size)
            for name, questions in {"short prompts": "arithmetic:4000:1", "GSM8K's prompts": questions_file}.items():
                if not questions:
                    continue
                examples = load_dataset(questions, limit=8, purpose="train").examples
                work = Workload(
                    name=size,
                    cell=f"{size}, {name}",
                    work=f"{size} parameters, {name}, 64 responses of 64 tokens",
                    model=str(Path(folder) / "model"),
                    prompts=[prompt_of(example, load_prompt("r1_zero")) for example in examples],
                    samples=8,
                    params=SamplingParams(max_tokens=64, min_tokens=64, stop=()),
                )
                rows += rows_of(work, repeats=repeats)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--questions-file", help="a data set with the questions of the fixed workload")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, help="random models of these sizes, as grpo_step.py has them"
    )
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    if args.sizes:
        return write(args.json, grid(args.sizes, args.questions_file, repeats=args.repeats))
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as second:
        if args.questions_file:
            questions = [example.question for example in load_dataset(args.questions_file, limit=256).examples]
            of_what = "questions of " + Path(args.questions_file).parent.name
        else:
            questions, of_what = word_problems(256), "word problems"
        prompts, filled = questions[:64], [load_prompt("r1_zero").fill(question) for question in questions]
        random_model(directory, prompts)
        random_model(second, filled)
        batch = load_dataset("arithmetic:4000:1", limit=32, purpose="train").examples
        workloads = [
            Workload(
                name="fixed",
                work=f"a random 0.85M Qwen2, {len(prompts)} {of_what} x 4 samples x 128 tokens",
                model=directory,
                prompts=prompts,
                samples=4,
                params=SamplingParams(max_tokens=128, min_tokens=128, stop=()),
            ),
            Workload(
                name="ragged",
                cell="quickstart",
                work="quickstart's first GRPO batch: 32 questions x 8 samples, up to 64 tokens, </answer> ends one",
                model=str(builtin_model_path()),
                prompts=[prompt_of(example, load_prompt("r1_zero")) for example in batch],
                samples=8,
                params=SamplingParams(max_tokens=64, min_tokens=4, stop=("</answer>",)),
                batches=4,
            ),
            Workload(
                name="eval",
                work=f"a random 0.85M Qwen2, {len(filled)} {of_what} in r1_zero x 1 sample x 64 tokens",
                model=second,
                prompts=filled,
                samples=1,
                params=SamplingParams(max_tokens=64, min_tokens=64, stop=()),
            ),
        ]
        write(args.json, [row for work in workloads for row in rows_of(work, repeats=args.repeats)])


if __name__ == "__main__":
    main()
