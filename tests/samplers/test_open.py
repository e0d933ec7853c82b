"""Which engine is chosen, why, and what is refused before anything is loaded."""

import importlib.util

import pytest

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import builtin_model_path, model_facts, model_path
from rlvr_cli.samplers.open import choose_engine, open_sampler


def test_auto_chooses_an_endpoint_if_one_is_named():
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
    facts = model_facts("transformers", "")
    assert "--model" in facts["name"]
    assert len(facts["sha256"]) == 64
    assert model_facts("openai", "m", base_url="http://h/v1") == {"name": "m", "endpoint": "http://h/v1"}


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_a_tiny_model_on_the_cpu_takes_one_thread(dtype):
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    sampler = open_sampler("transformers", "", dtype=dtype, device="cpu", sleep_mode=True)
    sampler.sleep()  # does nothing in this engine
    assert sampler.engine == "transformers"
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


def test_an_unknown_engine_is_refused():
    with pytest.raises(RlvrError, match="no engine 'tgi'"):
        open_sampler("tgi", "")


def test_a_missing_engine_names_the_line_that_installs_it():
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with pytest.raises(RlvrError, match=r"pip install -e '\.\[vllm\]'"):
        choose_engine("vllm", base_url="")
