"""Which engine is chosen, why, and what is refused before anything is loaded."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest

from rlvr_cli.config.ei import EiConfig
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.config.shared.engine import Engine, TrainingEngine
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import builtin_model_path, model_facts, model_path
from rlvr_cli.runs.provenance import EXTRA_PACKAGES
from rlvr_cli.samplers.open import (
    ENGINES,
    EngineKind,
    EngineSettings,
    check_model,
    choose_engine,
    open_sampler,
    settings_of,
)
from rlvr_cli.samplers.parallel.serve import open_engine


def test_auto_chooses_an_endpoint_if_one_is_named():
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    assert choose_engine("auto", base_url="http://localhost:1/v1").name == "openai"


def test_auto_gives_the_reason_for_transformers():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    engine = choose_engine("auto", base_url="")
    assert engine.name == "transformers"
    installed = importlib.util.find_spec("vllm") is not None
    assert engine.reason == (
        "no CUDA device; --engine vllm runs vLLM on the CPU" if installed else "vLLM is not installed"
    )


def test_a_named_engine_is_used():
    assert choose_engine("transformers", base_url="").name == "transformers"


def test_without_a_model_the_built_in_one_is_used_and_its_name_mentions_the_option():
    assert model_path("") == str(builtin_model_path())
    assert model_path("org/model") == "org/model"
    facts = model_facts("")
    assert "--model" in facts["name"]
    assert len(facts["sha256"]) == 64
    assert model_facts("m", base_url="http://h/v1") == {"name": "m", "endpoint": "http://h/v1"}


def test_a_quantized_model_is_left_to_vllm(tmp_path):
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    (tmp_path / "model.safetensors").touch()
    check_model("vllm", str(tmp_path))
    with pytest.raises(RlvrError, match=r"is quantized \(awq\)") as caught:
        check_model("transformers", str(tmp_path))
    assert "--engine vllm" in caught.value.hint


def test_vllm_is_not_put_on_another_gpu_than_it_was_asked_for(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(RlvrError, match="not on cuda:1") as caught:
        open_sampler("vllm", EngineSettings("", device="cuda:1"))
    assert "CUDA_VISIBLE_DEVICES=5" in caught.value.hint


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_a_tiny_model_on_the_cpu_takes_one_thread(dtype):
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    sampler = open_sampler("transformers", EngineSettings("", dtype=dtype, device="cpu", sleep_mode=True))
    sampler.sleep()  # does nothing in this engine
    assert sampler.engine == "transformers"
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


def test_an_unknown_engine_is_refused():
    with pytest.raises(RlvrError, match="no engine 'tgi'") as error:
        open_sampler("tgi", EngineSettings(""))
    assert all(name in error.value.hint for name in ENGINES)


def test_the_options_the_table_and_the_extras_name_the_same_engines():
    named = {
        name: kind for name, kind in ENGINES.items() if not kind.elsewhere
    }  # the others are named by their addresses
    assert get_args(Engine) == ("auto", *named)
    assert get_args(TrainingEngine) == ("auto", *(name for name, kind in named.items() if kind.trains))
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    needed = {kind.package: kind.extra for kind in ENGINES.values() if kind.package}
    assert all(any(re.match(rf"{package}\b", line) for line in extras[extra]) for package, extra in needed.items())
    assert set(needed) <= set(EXTRA_PACKAGES)


@pytest.mark.parametrize("config", [EvalConfig(), GrpoConfig(), EiConfig(), SftConfig()])
def test_an_engine_gets_the_options_of_the_command(config):
    options = {"model": "m", "max_batch_size": 3, "cuda_graphs": False, "seed": 7, "request_timeout": 9.0}
    assert settings_of(replace(config, **options)) == replace(settings_of(config), **options)
    missing = {f.name for f in fields(EngineSettings) if not hasattr(config, f.name)}
    endpoints = (
        set() if isinstance(config, EvalConfig) else {"base_url", "endpoint", "api_key_env", "endpoint_concurrency"}
    )
    adapters = {"lora_rank", "lora_alpha"} if isinstance(config, EvalConfig) else set()
    servers = {"weights_dir"} if isinstance(config, EvalConfig) else set()
    assert missing == {"sleep_mode", "takes_weights"} | endpoints | adapters | servers


def test_a_sampling_process_opens_no_engine_but_the_one_that_is_named(monkeypatch):
    opened = []
    monkeypatch.setitem(ENGINES, "third", EngineKind("Third", lambda settings: opened.append(settings) or "sampler"))
    sampler, policy_of = open_engine(
        "third", param_dtype="float32", compute_dtype="auto", model="", device="cpu", seed=5
    )
    assert (sampler, opened) == ("sampler", [EngineSettings("", seed=5)])  # on the first device, not the trainer's
    assert policy_of().device.type == "cpu"
    assert policy_of() is policy_of(), "it is loaded once"
    with pytest.raises(RlvrError, match="openai cannot load the trainer's weights"):
        open_engine("openai", param_dtype="float32", compute_dtype="auto", model="")
    with pytest.raises(RlvrError, match="no engine 'tgi'"):
        open_engine("tgi", param_dtype="float32", compute_dtype="auto", model="")


def test_endpoints_need_neither_torch_nor_transformers():
    code = "import sys, rlvr_cli.samplers.open; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_engine_names_the_line_that_installs_it():
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with pytest.raises(RlvrError, match=r"pip install -e '\.\[vllm\]'"):
        choose_engine("vllm", base_url="")
