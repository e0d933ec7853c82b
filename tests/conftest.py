"""Fixtures for all tests: a tiny random policy on disk, with the architecture of the models that users train.

`tiny_model_dir`  a directory that `transformers` loads by path: a two-layer Qwen2 and its byte-level BPE tokenizer (not for
                  vLLM on a CPU, whose kernels need a head size of at least 32; here it is 8).
`tiny_model`      the model in it, float32, eval mode, a fresh copy for each test: a test may train or overwrite it.
`tiny_tokenizer`  the tokenizer in it, shared by the session: treat it as read-only.
`forks`           the `rlvr` script without seconds of imports (`helpers/processes/forks.py`).
`forked`          for a module whose tests start samplers or trainers in this process: these are forks too.
`vllm_server`     the address of a vLLM server, for all tests that do not end it.
`read_once`       for a module whose tests are of something else than loading: it reads each model from disk once.

The model is random, but its logits spread enough (`initializer_range` far above the usual 0.02) that sampled tokens are
neither uniform nor always the same one. Special tokens: `<|endoftext|>` ends a response, `<|pad|>` pads.
"""

import atexit
import copy
import functools
import gc
import importlib.util
import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test reaches the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if importlib.util.find_spec("liger_kernel") and not list(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: its kernels then run on the CPU

from collections.abc import Iterator

import pytest
from hypothesis import settings

from forks import HEAVY, OF_PACKAGES, Forks, Server, fork_server

# No deadline: an example may wait for a busy machine. 40 examples, each time others: what is rare comes up in another run.
settings.register_profile("rlvr", deadline=None, max_examples=40)
settings.load_profile("rlvr")

TINY_CORPUS = (
    "What is 12 + 30? <think> 12 + 30 = 42. </think> <answer> 42 </answer>",
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it.",
    "Natalia sold 48 clips in April and half as many in May: 48 / 2 = 24, so 48 + 24 = 72 clips.",
    r"Solve x^2 - 5x + 6 = 0. The answer is \boxed{2, 3}, since (x - 2)(x - 3) = 0.",
    "User: naïve café, 数学, 😀 Assistant: ½ × π ≈ 1.57",
)


gc.disable()  # until the first test: what is imported is never garbage (`rlvr_cli.process.importing`)


_server = pytest.StashKey[Server]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    gc.freeze()
    # Here, before the first test: what forks `rlvr` is a fork of this process, and nothing of a test is to be in it.
    if any("forks" in item.fixturenames for item in session.items if isinstance(item, pytest.Function)):
        needed = {package for item in session.items for package in _needed(item)}
        more = [
            name
            for package, names in OF_PACKAGES.items()
            if package in needed and _is_installed(package)
            for name in names
        ]
        session.config.stash[_server] = fork_server([*HEAVY, *more])
    gc.enable()
    # After pytest's own collections, which would go through all of it; some libraries complain of what is not freed at the end.
    atexit.register(gc.unfreeze)


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests wait for processes that they have started, and for time limits."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest is begun first, so that nobody waits for it alone at the end. Where packages are missing, their tests skip."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
    for item in items:
        if missing := [package for package in _needed(item) if not _is_installed(package)]:
            # The README's command installs no extras; `.ci/run` installs all, and vLLM, and runs these tests there.
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(missing)}"))


def _needed(item: pytest.Item) -> list[str]:
    """The packages of extras that a test needs."""
    needed = []
    for marker in item.iter_markers():  # once: they are looked for in every class and folder
        if marker.name == "vllm":
            needed.append("vllm")
        elif marker.name == "extra":
            needed += marker.args
    return needed


@functools.cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread():
    """Use one thread: tiny operators gain nothing from a second one, and become slow when the cores are busy."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> Path:
    """A model directory: 2 layers, hidden 32, 4 query and 2 key-value heads, tied embeddings, 320 ids, context 512."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    directory = tmp_path_factory.mktemp("tiny-model")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TINY_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|pad|>")
    tokenizer.save_pretrained(directory)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(tokenizer),
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=512,
                tie_word_embeddings=True,
                initializer_range=0.3,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=None,
            )
        )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(directory).save_pretrained(directory)  # with the way in which Qwen's splits words
    return directory


@pytest.fixture(scope="session")
def _loaded_tiny_model(tiny_model_dir):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32, local_files_only=True)
    return model.eval()


@pytest.fixture
def tiny_model(_loaded_tiny_model):
    """The tiny policy, float32, in eval mode; each test has its own copy."""
    return copy.deepcopy(_loaded_tiny_model)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_dir):
    """The tiny policy's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir, local_files_only=True)


@pytest.fixture(scope="session")
def forks(tmp_path_factory, request) -> Iterator[Forks]:
    with Forks(tmp_path_factory.mktemp("output"), request.config.stash[_server]) as forks:
        yield forks


@pytest.fixture(scope="session")
def _vllm_server(forks, tmp_path_factory) -> Iterator[str]:
    from vllm_server import real_servers

    # What a model's generation_config.json may say: nothing that is sampled from this server may depend on it.
    defaults = {"top_k": 1, "repetition_penalty": 1.5, "temperature": 0.6, "top_p": 0.5}
    with real_servers(forks, tmp_path_factory.mktemp("server")) as start:
        ((url, _),) = start(1, "--override-generation-config", json.dumps(defaults))
        yield url


@pytest.fixture
def vllm_server(_vllm_server) -> str:
    """The address of a vLLM server of the built-in model, which no test may end; it has the model's own weights when a test begins."""
    from rlvr_cli.models.identity import builtin_model_path
    from rlvr_cli.models.load import load_policy
    from rlvr_cli.samplers.parallel.servers import ServersSampler

    policy = load_policy(builtin_model_path(), device="cpu")
    ServersSampler([_vllm_server], policy.tokenizer, timeout=60).load_weights(policy, 0)
    return _vllm_server


@pytest.fixture(scope="module")
def forked(forks) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("subprocess.Popen", forks.popen)
        yield


@pytest.fixture(scope="module")
def read_once() -> Iterator[None]:
    from loaded import models_read_once

    with models_read_once():
        yield
