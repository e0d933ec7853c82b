"""Create a tiny model: texts -> an untrained Qwen2 with a tokenizer trained on them, saved like any hub model.

The design follows measurements of what learns in under a minute on one core: every frequent phrase between digits is
one token, so that the long r1_zero template takes only a handful of tokens; initializer_range is 0.1, since 0.02 learns
far more slowly at this size. `python -m rlvr_cli.models.tiny DIRECTORY` makes the untrained start of the built-in
model, with `--as-run` in the folder `model` of a run, where `rlvr quickstart` has it.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.policy import Policy
from rlvr_cli.runs.manifest import RUN_FILE
from rlvr_cli.runs.provenance import environment
from rlvr_cli.runs.readers import ENDED, read_metadata
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.files import os_errors_as_user_errors
from rlvr_cli.runs.storage.sums import sums_of

END_OF_TEXT = "<|endoftext|>"


def new_tokenizer(
    texts: Sequence[str], *, vocab_size: int = 320, min_share: float = 0.01, words: Sequence[str] = ()
) -> Any:
    """Train Qwen2's byte-level BPE on `texts`, and add their frequent phrases as tokens.

    A phrase is the text between digits and line ends; it becomes an added token if it occurs at least
    `min_share * len(texts)` times. It cannot be a BPE token: for a Qwen2 model, transformers and vLLM replace the
    pre-tokenizer of tokenizer.json by Qwen's own, which splits at spaces. Any text can be encoded.

    Args:
        words: added tokens, too.
    """
    from tokenizers import Tokenizer, models, trainers
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import AddedToken, Qwen2Tokenizer

    qwen2 = Qwen2Tokenizer().backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = qwen2.normalizer, qwen2.pre_tokenizer
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    learned = json.loads(bpe.to_str())["model"]
    merges: Any = [tuple(pair) for pair in learned["merges"]]  # Qwen2Tokenizer's annotation says strings
    tokenizer = Qwen2Tokenizer(vocab=learned["vocab"], merges=merges)
    phrases = Counter(p for text in texts for p in re.split(r"[0-9\n]+", text) if len(p) > 1)
    frequent = sorted(p for p, n in phrases.items() if n >= min_share * len(texts))
    tokenizer.add_tokens([AddedToken(p, normalized=False) for p in [*frequent, *words]])
    return tokenizer


def new_model(tokenizer: Any, *, seed: int = 0) -> Any:
    """An untrained Qwen2: 2 layers of width 128, 4 heads over 2 KV heads, tied embeddings, 4,096 positions."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def new_tiny_model(directory: Path, *, texts: Sequence[str], seed: int = 0, words: Sequence[str] = ()) -> None:
    """Train a tokenizer on `texts`, with `words` as tokens, initialize the model from `seed`, and save both in `directory`."""
    tokenizer = new_tokenizer(texts, words=words)
    Policy(new_model(tokenizer, seed=seed), tokenizer).save(directory)


def main() -> None:
    """Make the untrained start of the built-in model from built-in traces."""
    try:
        _main()
    except RlvrError as error:
        sys.exit("\n  ".join(filter(None, (f"error: {error.problem}", error.hint))))


def _main() -> None:
    from rlvr_cli.data.datasets import load_dataset
    from rlvr_cli.data.prompts import load_prompt

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dataset", default="arithmetic", choices=("arithmetic", "multiplication"), help="of the texts"
    )
    parser.add_argument("--as-run", action="store_true", help="make DIRECTORY a run, and the model in its folder model")
    arguments = parser.parse_args()
    template = load_prompt("r1_zero")
    traces = load_dataset(f"{arguments.dataset}:2000", purpose="traces").examples
    texts = [text for e in traces for text in (template.fill(e.question), e.response or "")]
    words = [f"{number:02}" for number in range(100)] if arguments.dataset == "multiplication" else []
    make = partial(new_tiny_model, texts=texts, seed=arguments.seed, words=words)
    path: Path = arguments.directory
    with os_errors_as_user_errors(path):
        if not arguments.as_run:
            return make(path)
        facts = {"model": {"name": f"tiny model for {arguments.dataset}, untrained"}}
        metadata = {"seed": arguments.seed, "facts": facts}
        with _begun(path, metadata) or RunDir.create(
            path.parent, "tiny", name=path.name, metadata={**metadata, "environment": environment()}
        ) as run:
            make(run.path / "model")
            run.update(model_files=sums_of(run.path / "model"))


def _begun(path: Path, metadata: Mapping[str, Any]) -> RunDir | None:
    """The run with this metadata that an earlier call has begun and not finished, if there is one."""
    known = read_metadata(path) if (path / RUN_FILE).exists() else {"status": "new"}
    is_begun = known["status"] not in ("new", *ENDED) and {"command": "tiny", **metadata}.items() <= known.items()
    return RunDir.resume(path) if is_begun else None


if __name__ == "__main__":
    main()
