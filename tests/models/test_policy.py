"""The policy: what loads, what is refused and with which message, complete saves, and adapters by a subclass."""

import copy
import hashlib
import io
import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertGenerationConfig,
    DogeForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    RobertaConfig,
    XLMConfig,
)

from marks import slow
from pages import from_the_system
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.compute.device import resolve_compute_dtype
from rlvr_cli.models.identity import builtin_model_path, model_identity, model_shape
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.log_probs import get_response_log_probs, wanted_in
from rlvr_cli.models.policy import Critic, Policy, as_policy, distinct_tensors
from rlvr_cli.models.pretrained import load_context_length, load_end_tokens
from rlvr_cli.models.tokens.tokenization import collate
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.samplers.parallel.process import SamplingProcess
from rlvr_cli.training.checkpoints import checkpoint_bytes, load_checkpoint, save_checkpoint
from rlvr_cli.training.losses.inputs import LossOutputs
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.traces import check_lengths
from rlvr_cli.training.updates.scores import compute_log_probs
from rlvr_cli.training.updates.update import train_update
from rlvr_cli.types import Example, Request, SamplingParams


@pytest.fixture
def broken(tiny_model_dir, tmp_path):
    """A copy of the tiny model's directory, to be damaged."""
    return shutil.copytree(tiny_model_dir, tmp_path / "broken")


def edit_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(path, **options) -> RlvrError:
    with pytest.raises(RlvrError) as info:
        load_policy(path, **options)
    assert info.value.hint
    return info.value


@pytest.mark.skipif(
    any(name.startswith(("MALLOC_", "GLIBC_")) for name in os.environ), reason="the environment decides"
)
def test_with_a_model_on_the_cpu_what_is_freed_is_kept(tiny_model_dir):
    load_policy(tiny_model_dir, device="cpu")
    assert from_the_system() < 0.2


def test_load_from_a_path(tiny_model_dir, tiny_model):
    policy = load_policy(str(tiny_model_dir))
    model, tokenizer = policy.model, policy.tokenizer
    assert not model.training
    assert model.dtype == torch.float32
    assert policy.attention == "sdpa"
    assert tokenizer.pad_token == "<|pad|>"
    assert all(p.equal(q) for p, q in zip(model.parameters(), tiny_model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_load_in_another_precision(tiny_model_dir, dtype):
    policy = load_policy(tiny_model_dir, dtype=dtype, device="cpu")
    assert policy.model.dtype == policy.compute_dtype == getattr(torch, dtype)


@pytest.mark.parametrize(
    ("name", "weights", "device", "expected"),
    [
        ("auto", torch.float32, "cpu", torch.float32),
        ("auto", torch.float32, "mps", torch.float32),
        ("auto", torch.float32, "cuda:1", torch.bfloat16),
        ("auto", torch.bfloat16, "cuda", torch.bfloat16),
        ("auto", torch.float16, "cuda", torch.float16),
        ("auto", torch.float64, "cuda", torch.float64),
        ("float32", torch.float32, "cuda", torch.float32),
        ("bfloat16", torch.float32, "cpu", torch.bfloat16),
        ("bfloat16", torch.bfloat16, "cpu", torch.bfloat16),
    ],
)
def test_the_precision_of_matrix_products(name, weights, device, expected):
    assert resolve_compute_dtype(name, weights=weights, device=torch.device(device)) == expected


@pytest.mark.parametrize(
    ("dtype", "compute_dtype"),
    [("bfloat16", "float32"), ("float16", "bfloat16"), ("float32", "float16"), ("float32", "int8")],
)
def test_a_precision_that_weights_do_not_compute_in_is_refused(tiny_model_dir, dtype, compute_dtype):
    error = refusal(tiny_model_dir, dtype=dtype, compute_dtype=compute_dtype)
    assert f"{dtype} do not compute in {compute_dtype!r}" in error.problem
    assert dtype in error.hint


def test_a_policy_and_its_reference_compute_as_asked_for(tiny_model_dir):
    matrix = torch.ones(2, 2)
    policy = load_policy(tiny_model_dir, compute_dtype="bfloat16")
    for each in (policy, policy.reference()):
        assert each.facts == {
            "device": "cpu",
            "attention": "sdpa",
            "param_dtype": "float32",
            "compute_dtype": "bfloat16",
            "kernels": "torch",
        }
        with each.autocast():
            assert (matrix @ matrix).dtype == torch.bfloat16
            with each.autocast(enabled=False):
                assert (matrix @ matrix).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16), load_policy(tiny_model_dir).autocast():
        assert (matrix @ matrix).dtype == torch.float32


def test_a_tokenizer_without_padding_pads_with_eos(broken):
    path = broken / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["pad_token"]
    path.write_text(json.dumps(config))
    assert load_policy(broken).tokenizer.pad_token == "<|endoftext|>"


def test_a_missing_path_is_not_taken_for_a_hub_id(tmp_path):
    for path in (tmp_path / "nothing", str(tmp_path / "nothing"), "./nothing", "a/b/c", ""):
        assert "no model directory" in refusal(path).problem


def test_an_unknown_hub_id_without_network():
    error = refusal("some-org/no-such-model")
    assert "some-org/no-such-model" in error.problem
    assert "no such directory" in error.problem
    assert "HF_HUB_OFFLINE" in error.hint


def test_a_directory_that_is_no_model(tmp_path, tiny_model_dir):
    assert "no config.json" in refusal(tmp_path).problem
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    assert f"Did you mean {tmp_path / 'model'}?" in refusal(tmp_path).hint  # a run directory


def test_a_file_is_not_a_directory(broken):
    assert "is a file" in refusal(broken / "model.safetensors").problem


class Evil:
    """Unpickling it would create the file `trace`."""

    def __init__(self, trace: Path) -> None:
        self.trace = str(trace)

    def __reduce__(self):
        return open, (self.trace, "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_never_opened(broken, tmp_path, name):
    (broken / "model.safetensors").unlink()
    torch.save(Evil(tmp_path / "trace"), broken / name)
    error = refusal(broken)
    assert name in error.problem
    assert "pickle" in error.problem
    assert "convert" in error.hint
    assert "convert" in refusal(broken / name).hint
    assert not (tmp_path / "trace").exists()


def test_gguf_names_the_model_that_it_was_made_from(tmp_path, broken):
    (tmp_path / "q4.gguf").touch()
    for path in (tmp_path, tmp_path / "q4.gguf"):
        error = refusal(path)
        assert f"{path} has its weights in GGUF" in error.problem
        assert "Use the model that it was made from" in error.hint
    shutil.copy(tmp_path / "q4.gguf", broken)
    load_policy(broken, device="cpu")  # its safetensors


def test_safetensors_beside_a_pickle_are_what_is_loaded(broken, tmp_path):
    torch.save(Evil(tmp_path / "trace"), broken / "pytorch_model.bin")
    load_policy(broken)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("model_type", ["qwen2", "of_its_own"])
def test_code_in_the_repository_is_never_run(broken, tmp_path, tiny_tokenizer, monkeypatch, model_type):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))  # transformers may ask
    (broken / "generation_config.json").unlink()
    trace = tmp_path / "trace"
    (broken / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    own = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", "evil.T"]}
    edit_config(broken, model_type=model_type, auto_map=own)
    edit = broken / "tokenizer_config.json"
    edit.write_text(json.dumps({**json.loads(edit.read_text()), "auto_map": own}))
    if model_type == "qwen2":
        assert type(load_policy(broken).model).__module__.startswith("transformers.")
    else:
        assert "code from its repository" in refusal(broken).problem
        for read in (model_shape, partial(load_end_tokens, tokenizer=tiny_tokenizer)):
            with pytest.raises(RlvrError, match="code from its repository"):
                read(broken)
        assert load_context_length(broken) is None
    assert not trace.exists()


def test_damage_is_named(tiny_model_dir, tmp_path):
    def damaged(name, change):
        directory = shutil.copytree(tiny_model_dir, tmp_path / name)
        change(directory)
        return refusal(directory).problem

    weights = (tiny_model_dir / "model.safetensors").read_bytes()
    assert "SafetensorError" in damaged("cut", lambda d: (d / "model.safetensors").write_bytes(weights[:5000]))
    assert "not a valid JSON" in damaged("json", lambda d: (d / "config.json").write_text("{"))
    assert "has no weights" in damaged("none", lambda d: (d / "model.safetensors").unlink())
    assert "no tokenizer" in damaged("tokenizer", lambda d: (d / "tokenizer.json").unlink())
    for name, text in {"list": "[1]", "class": '{"tokenizer_class": 3}'}.items():
        assert "The tokenizer in" in damaged(name, lambda d, text=text: (d / "tokenizer_config.json").write_text(text))
    deeper = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    assert "model.layers.2" in damaged("layers", lambda d: edit_config(d, **deeper))
    wider = damaged("width", lambda d: edit_config(d, intermediate_size=128))
    assert "mlp" in wider
    assert "(64, 32) and should be (128, 32)" in wider or "(32, 64) and should be (32, 128)" in wider
    assert "has model type `zork`" in damaged("type", lambda d: edit_config(d, model_type="zork"))
    assert "hidden_size" in damaged("field", lambda d: edit_config(d, hidden_size="x"))
    typed = damaged("types", lambda d: edit_config(d, layer_types=["full_attention"] * 5))
    assert typed.count("`num_hidden_layers` (2)") == 1  # what is wrong, below the name of the check
    dtype = damaged("dtype", lambda d: edit_config(d, dtype="floaty"))
    assert "config.json" in dtype
    assert "has the dtype 'floaty'" in dtype  # it is not the tokenizer, which is loaded first, that is damaged
    heads = damaged("heads", lambda d: edit_config(d, num_attention_heads=0))
    assert "ZeroDivisionError" in heads
    assert "AssertionError: Padding" in damaged("vocabulary", lambda d: edit_config(d, vocab_size=0))
    unknown, no_json = refusal(tmp_path / "type").problem, refusal(tmp_path / "json").problem
    for name, problem in {"types": typed, "heads": heads, "type": unknown, "json": no_json}.items():
        with pytest.raises(RlvrError) as of_sizes:  # which a plan asks for first
            model_shape(tmp_path / name)
        assert of_sizes.value.problem == problem


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": ["x"]}, "['x']"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
    ],
)
def test_quantized_weights_are_refused_before_they_are_read(broken, tmp_path, settings, method):
    edit_config(broken, **settings)
    (broken / "model.safetensors").write_bytes(b"")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    names = {"peft_type": "LORA", "base_model_name_or_path": str(broken), "r": 4, "lora_alpha": 8}
    (adapter / "adapter_config.json").write_text(json.dumps(names))
    (adapter / "adapter_model.safetensors").touch()
    for path in (broken, adapter):
        error = refusal(path)
        assert error.problem == f"{broken} is quantized ({method})."
        assert "use the model that it was made from" in error.hint


def test_a_dequantized_copy_may_say_that_it_was_quantized(broken):
    off = {"load_in_4bit": False, "load_in_8bit": False}
    edit_config(broken, quantization_config={"quant_method": "bitsandbytes", **off})
    load_policy(broken, device="cpu")


BERT = {"vocab_size": 320, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.mark.parametrize(
    ("config", "decoder"),
    [
        (BertConfig(**BERT), "is_decoder"),
        (RobertaConfig(**BERT), "is_decoder"),
        (BertGenerationConfig(**BERT, pad_token_id=0), "is_decoder"),
        (XLMConfig(vocab_size=320, emb_dim=8, n_layers=1, n_heads=2), "causal"),
    ],
)
def test_an_encoder_is_refused_and_loaded_as_a_decoder(broken, config, decoder):
    AutoModelForCausalLM.from_config(config).save_pretrained(broken)
    error = refusal(broken)
    assert "is an encoder (" in error.problem
    assert "decoder-only" in error.hint
    edit_config(broken, **{decoder: True})
    load_policy(broken, device="cpu")


@pytest.mark.slow  # transformers names each model that it has
def test_a_model_of_another_kind_cannot_be_loaded(broken):
    edit_config(broken, model_type="t5")
    assert "cannot be loaded" in refusal(broken).problem


def test_a_tokenizer_of_another_model(broken):
    tokenizer = AutoTokenizer.from_pretrained(broken)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(broken)
    error = refusal(broken)
    assert "ids up to 320" in error.problem
    assert "320 embeddings" in error.problem


def test_unknown_dtypes_and_devices_are_refused(tiny_model_dir):
    assert "bfloat16" in refusal(tiny_model_dir, dtype="int8").hint
    for device in ("warp", "meta", "cpu:1", "cuda:", "cuda:-1", "cuda:1000", "cuda:0\n", ""):
        assert "No device" in refusal(tiny_model_dir, device=device).problem
    assert "no device cuda:97" in refusal(tiny_model_dir, device="cuda:97").problem


def test_save_and_load_are_inverse(tiny_model, tiny_tokenizer, tmp_path, capfd):
    with torch.no_grad():
        tiny_model.model.norm.weight.add_(1.0)
    target = tmp_path / "deep" / "model"
    Policy(tiny_model, tiny_tokenizer).save(target)
    loaded = load_policy(target)
    model, tokenizer = loaded.model, loaded.tokenizer
    assert all(p.equal(q) for p, q in zip(model.parameters(), tiny_model.parameters(), strict=True))
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()  # still tied
    assert tokenizer("1 + 1 = 数")["input_ids"] == tiny_tokenizer("1 + 1 = 数")["input_ids"]
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == 0
    assert [p.name for p in target.parent.iterdir()] == ["model"]  # nothing temporary is left
    assert target.stat().st_mode & 0o777 == target.parent.stat().st_mode & 0o777
    (tmp_path / "any file").touch()
    assert {path.stat().st_mode for path in target.iterdir()} == {(tmp_path / "any file").stat().st_mode}
    assert capfd.readouterr() == ("", "")  # progress bars are the caller's


def test_save_replaces_what_was_there(tiny_model, tiny_tokenizer, tmp_path):
    target = tmp_path / "model"
    Policy(tiny_model, tiny_tokenizer).save(target)
    (target / "stale.txt").write_text("of the model before")
    before = model_identity(target)
    with torch.no_grad():
        tiny_model.model.norm.weight.add_(1.0)
    Policy(tiny_model, tiny_tokenizer).save(target)
    assert not (target / "stale.txt").exists()
    assert model_identity(target)["sha256"] != before["sha256"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_save_that_fails_leaves_the_old_model(tiny_model, tiny_tokenizer, tmp_path):
    target = tmp_path / "model"
    Policy(tiny_model, tiny_tokenizer).save(target)
    before = model_identity(target)

    class Full:
        def save_pretrained(self, directory):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        Policy(tiny_model, Full()).save(target)
    assert model_identity(target) == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({"temperature": 0.6, "top_p": 0.9}, {"do_sample": True, "temperature": 0.6}), ({"max_new_tokens": -1}, {})],
)
def test_a_model_with_an_invalid_generation_config_can_be_saved(tiny_model, tiny_tokenizer, tmp_path, settings, kept):
    original = GenerationConfig(eos_token_id=[0, 5], pad_token_id=1)
    for name, value in settings.items():
        setattr(original, name, value)
    tiny_model.generation_config = original
    with pytest.raises(ValueError, match=r"invalid|greater"):
        tiny_model.save_pretrained(tmp_path / "plain")
    Policy(tiny_model, tiny_tokenizer).save(tmp_path / "model")
    assert tiny_model.generation_config is original
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model").generation_config
    assert saved.eos_token_id == [0, 5]
    assert {name: getattr(saved, name) for name in kept} == kept


def test_the_identity_depends_on_the_weights(tiny_model_dir, tiny_model, tmp_path):
    identity = model_identity(str(tiny_model_dir))
    digest = hashlib.sha256((tiny_model_dir / "model.safetensors").read_bytes()).hexdigest()
    assert identity == {
        "path": str(tiny_model_dir),
        "sha256": hashlib.sha256(f"model.safetensors {digest}\n".encode()).hexdigest(),
        "bytes": (tiny_model_dir / "model.safetensors").stat().st_size,
        "parameters": tiny_model.num_parameters(),
        "tokenizer_sha256": identity["tokenizer_sha256"],
    }
    copy = shutil.copytree(tiny_model_dir, tmp_path / "copy")
    shutil.copy(copy / "model.safetensors", copy / "consolidated.safetensors")  # as Mistral's have: not loaded
    assert {**model_identity(copy), "path": ""} == {**identity, "path": ""}
    assert model_identity("some-org/no-such-model") == {"id": "some-org/no-such-model", "revision": None}
    with pytest.raises(RlvrError, match="no model directory"):
        model_identity(tmp_path / "nothing")


def test_identity_of_weights_in_several_files(tiny_model, tiny_tokenizer, tmp_path):
    tiny_model.save_pretrained(tmp_path / "parts", max_shard_size="40KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    identity = model_identity(tmp_path / "parts")
    assert identity["parameters"] == tiny_model.num_parameters()
    shutil.copy(builtin_model_path() / "model.safetensors", tmp_path / "parts" / "consolidated.safetensors")
    assert model_identity(tmp_path / "parts") == identity, "a second copy, which is not loaded"
    tiny_tokenizer.save_pretrained(tmp_path / "parts")
    model = load_policy(tmp_path / "parts").model
    assert all(p.equal(q) for p, q in zip(model.parameters(), tiny_model.parameters(), strict=True))


@pytest.mark.parametrize("kind", [GPT2LMHeadModel, GPTNeoXForCausalLM, DogeForCausalLM])
def test_sizes_of_models_with_other_names_for_them(tmp_path, kind):
    """The files of older versions of transformers hold masks of attention beside the parameters. A Doge may have no experts."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 64}
    more = {"intermediate_size": 24} if kind is not GPT2LMHeadModel else {}
    model = kind(kind.config_class(**sizes, **more))
    mask = {"h.0.attention.bias": torch.ones(1, 1, 16, 16)}
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    save_file(stored | mask, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert model_shape(tmp_path) == {
        "parameters": model.num_parameters(), "layers": 3, "hidden": 8, "intermediate": 24 if more else 32,
        "gates": int(kind is DogeForCausalLM), "dense_layers": 3, "query_width": 8, "kv_width": 8, "vocabulary": 64,
    }  # fmt: skip
    assert model_identity(tmp_path)["parameters"] == model.num_parameters()


@pytest.fixture
def downloaded(tiny_model_dir, tmp_path, monkeypatch):
    """A snapshot of the tiny model in the Hub's cache, as `org/tiny`."""
    import huggingface_hub.constants

    repository = tmp_path / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return shutil.copytree(tiny_model_dir, repository / "snapshots" / COMMIT)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("text", ["", '{"eos_token_id": [0, 5', "[1]", '{"eos_token_id": ["x"]}'])
def test_a_damaged_generation_config_is_not_taken_for_a_missing_one(downloaded, tiny_tokenizer, text):
    (downloaded / "generation_config.json").write_text(text)
    for path in (downloaded, "org/tiny"):
        error = refusal(path)
        assert f"The generation config in {path} cannot be loaded" in error.problem
        with pytest.raises(RlvrError, match="generation config") as without_the_model:
            load_end_tokens(path, tiny_tokenizer)
        assert without_the_model.value.problem == error.problem


def test_a_downloaded_model_is_loaded_and_identified_by_its_revision(downloaded, tiny_model_dir, tiny_model):
    model = load_policy("org/tiny").model
    assert all(p.equal(q) for p, q in zip(model.parameters(), tiny_model.parameters(), strict=True))
    expected = model_identity(tiny_model_dir)
    del expected["path"]
    assert model_identity("org/tiny") == {"id": "org/tiny", "revision": COMMIT, **expected}


@pytest.mark.filterwarnings("ignore:The attention of:UserWarning")
def test_a_model_without_pytorchs_attention_computes_with_that_of_transformers(tiny_tokenizer, tmp_path):
    """gpt-oss has a sink in each head, and windows."""
    config = GptOssConfig(
        vocab_size=320, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=64,
        sliding_window=3, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, initializer_range=0.3,
        bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    model = GptOssForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    policy = load_policy(tmp_path / "model")
    assert policy.attention == "eager"
    batch = collate([[5, 6, 7, 8]] * 2 + [[3]], [[9, 10], [9, 11, 12], [2, 3, 4, 5, 6]], pad_id=1)
    for row, scores in enumerate(compute_log_probs(policy, batch=batch, micro_batch_size=3)):
        inside = batch["response_mask"][row]
        ids, labels = (
            batch[name][row : row + 1, : int(inside.nonzero().max()) + 1] for name in ("input_ids", "labels")
        )
        with torch.no_grad():
            plain = model(ids).logits.log_softmax(-1).gather(-1, labels[..., None]).flatten()
        torch.testing.assert_close(scores[inside], plain[inside[: len(plain)]], atol=1e-5, rtol=0)


def test_a_downloaded_model_that_is_quantized_is_refused(downloaded):
    edit_config(downloaded, quantization_config={"quant_method": "awq"})
    assert refusal("org/tiny").problem == "org/tiny is quantized (awq)."


def test_a_downloaded_pickle_is_never_opened(downloaded, tmp_path):
    (downloaded / "model.safetensors").unlink()
    torch.save(Evil(tmp_path / "trace"), downloaded / "pytorch_model.bin")
    assert "org/tiny" in refusal("org/tiny").problem
    assert not (tmp_path / "trace").exists()


def test_the_builtin_model_lies_in_the_package():
    assert builtin_model_path().parts[-3:] == ("rlvr_cli", "assets", "tiny-math")


# --- what a policy returns about its model


def test_a_policy_of_a_model_is_a_view_of_it(tiny_model, tiny_tokenizer):
    policy = Policy(tiny_model, tiny_tokenizer)
    assert as_policy(policy) is policy
    assert as_policy(tiny_model).model is tiny_model
    assert (policy.vocabulary_size, policy.context_length) == (320, 512)
    assert policy.num_parameters == sum(p.numel() for p in tiny_model.parameters())
    assert all(
        tensor.data_ptr() == tiny_model.state_dict()[name].data_ptr() for name, tensor in policy.weights().items()
    )
    with pytest.raises(AssertionError, match="a model alone"):
        assert as_policy(tiny_model).tokenizer


@pytest.fixture
def longrope(tiny_tokenizer):
    """A Phi-3 whose config allows 128 tokens, and whose positions change for all rows if one has more than 16."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10_000.0}
    config = Phi3Config(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=128, original_max_position_embeddings=16, rope_parameters=rope, initializer_range=0.5,
        sliding_window=None, bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Policy(Phi3ForCausalLM(config).eval(), tiny_tokenizer)


def test_positions_that_depend_on_other_rows_end_the_context(longrope, tiny_model):
    assert longrope.context_length == 16
    assert "longest row" in longrope.context_note
    assert as_policy(tiny_model).context_note == ""

    def scores(lengths):
        rows = [[5 + (7 * i + row) % 300 for i in range(length)] for row, length in enumerate(lengths)]
        batch = collate([row[:2] for row in rows], [row[2:] for row in rows], pad_id=1)
        return compute_log_probs(longrope, batch, micro_batch_size=len(lengths))[0, :9]

    alone = scores([10])
    torch.testing.assert_close(scores([10, 17]), alone, atol=1e-5, rtol=0)  # 16 are read: a row is a row
    assert (scores([10, 18]) - alone).abs().max() > 0.01  # beyond, it is not: the reason


def test_an_engine_and_a_trainer_stay_within_the_context_that_rows_do_not_share(longrope):
    sampler = TransformersSampler(longrope)
    prompt = "1 + 1 ="
    room = 16 - len(longrope.tokenizer(prompt).input_ids)
    (answer,) = sampler.sample([Request(prompt, (0,))], SamplingParams(max_tokens=room, min_tokens=room))
    assert len(answer.token_ids) == room
    with pytest.raises(RlvrError, match=r"holds 16 \(its original context: .* longest row of a batch\)"):
        sampler.sample([Request(prompt, (0,))], SamplingParams(max_tokens=room + 1))
    example = Example(id="x", question="q", ground_truth="1")
    limit = {"longest": longrope.context_length, "note": longrope.context_note}
    check_lengths([example], [[1] * 8], [[1] * 8], **limit)
    with pytest.raises(RlvrError, match=r"holds 16 \(its original context"):
        check_lengths([example], [[1] * 8], [[1] * 9], **limit)


@pytest.mark.parametrize(
    ("configured", "expected"),
    [(None, (0,)), (5, (0, 5)), ([7, 0, 3], (0, 3, 7)), (-1, (0,)), ([0, 319, 320, 5000], (0, 319))],
)
def test_every_eos_counts_that_the_model_can_draw(tiny_model, tiny_tokenizer, configured, expected):
    tiny_model.generation_config.eos_token_id = configured
    assert Policy(tiny_model, tiny_tokenizer).eos_token_ids == expected


def test_the_head_of_the_hidden_states_gives_the_logits(tiny_model):
    policy, ids = as_policy(tiny_model), torch.arange(12).view(2, 6)
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 1]]).bool()
    head = policy.head()
    assert head.bias is None
    logits = policy.hidden_states(ids, wanted_in(policy, ids, mask)) @ head.weight.T
    torch.testing.assert_close(logits, tiny_model(input_ids=ids).logits[mask])


def test_a_reference_stays_what_was_loaded(tiny_model_dir):
    policy = load_policy(tiny_model_dir, dtype="bfloat16")
    loaded = {name: tensor.clone() for name, tensor in policy.weights().items()}
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter.add_(1.0)
    reference = policy.reference()
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter.add_(1.0)
    assert reference.trainable_parameters() == {}
    assert all(tensor.equal(loaded[name]) for name, tensor in reference.weights().items())
    assert not any(tensor.equal(loaded[name]) for name, tensor in policy.weights().items())


# --- an adapter needs a subclass of Policy and nothing else


class Rank1(torch.nn.Module):
    """A linear layer with a trained matrix of rank 1 added to a frozen one."""

    def __init__(self, plain: torch.nn.Linear, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.plain = plain
        self.left = torch.nn.Parameter(torch.randn(plain.out_features, 1, generator=draw) / 2)
        self.right = torch.nn.Parameter(torch.randn(1, plain.in_features, generator=draw) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x) + x @ self.right.T @ self.left.T


class Adapted(Policy):
    """A policy with such layers: everything that differs from a plain one."""

    def weights_for_engine(self):
        weights = {n.replace(".plain.", "."): t for n, t in self.weights().items() if not n.endswith(("left", "right"))}
        for name, module in self.model.named_modules():
            if isinstance(module, Rank1):
                weights[f"{name}.weight"] = (module.plain.weight + module.left @ module.right).detach()
        return weights

    def plain_modules(self):
        return ((name, module) for name, module in self.model.named_modules() if not isinstance(module, Rank1))


def adapt(tiny_model, tiny_tokenizer):
    model = copy.deepcopy(tiny_model).requires_grad_(False)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.q_proj = Rank1(layer.self_attn.q_proj, 2 * number)
        layer.mlp.down_proj = Rank1(layer.mlp.down_proj, 2 * number + 1)
    return Adapted(model, tiny_tokenizer)


@pytest.fixture
def adapted(tiny_model, tiny_tokenizer):
    return adapt(tiny_model, tiny_tokenizer)


PARAMS = SamplingParams(max_tokens=12, min_tokens=0, stop=())
REQUESTS = [Request("What is 12 + 30?", (1, 2, 3)), Request("数学", (4,))]


def samples(sampler):
    return sorted(sampler.sample(REQUESTS, PARAMS), key=lambda c: (c.request_index, c.sample_index))


def assert_sampled_from(policy, completions):
    """The sampler's log-probabilities are those of the policy's own forward pass."""
    for c in completions:
        batch = collate([c.prompt_ids], [c.token_ids], pad_id=1)
        ours = compute_log_probs(policy, batch, micro_batch_size=1)[batch["response_mask"]]
        assert list(c.logprobs) == pytest.approx(ours.tolist(), abs=1e-4)


def test_merged_weights_reach_an_engine_with_a_model_of_its_own(adapted, tiny_model, tiny_tokenizer):
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    before = samples(sampler)
    sampler.load_weights(adapted, 1)
    after = samples(sampler)
    assert [c.token_ids for c in after] != [c.token_ids for c in before]
    assert_sampled_from(adapted, after)
    assert set(tiny_model.state_dict()) == set(adapted.weights_for_engine())


def test_an_engine_that_shares_the_model_takes_its_fast_step_with_merged_weights(adapted, tiny_model):
    sampler = TransformersSampler(adapted)
    assert sampler.notes == ()
    for version in (1, 2):
        with torch.no_grad():
            for parameter in adapted.trainable_parameters().values():
                parameter.mul_(1.1)
        sampler.load_weights(adapted, version)
        assert_sampled_from(adapted, samples(sampler))
    adapted.weights_for_engine = tiny_model.state_dict  # an engine without the adapter's weights is detected
    with pytest.raises(RlvrError, match="does not serve the model's weights"):
        sampler.load_weights(adapted, 3)
    del adapted.weights_for_engine
    sampler.load_weights(adapted, 4)


def test_merged_weights_reach_a_sampling_process(forked, adapted, tiny_model_dir):
    how = {
        "dtype": "auto", "param_dtype": "float32", "compute_dtype": "auto", "device": "cpu", "max_batch_size": None,
        "cuda_graphs": True, "max_model_len": None, "gpu_memory_utilization": 0.3, "seed": 0,
    }  # fmt: skip
    there = SamplingProcess("transformers", {"model": str(tiny_model_dir), **how})
    try:
        there.load_weights(adapted, 1)
        assert_sampled_from(adapted, samples(there))
    finally:
        there.close()


def test_what_is_saved_is_the_merged_model(adapted, tmp_path):
    adapted.save(tmp_path / "model")
    loaded = load_policy(tmp_path / "model")
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(input_ids=ids).logits, adapted.model(input_ids=ids).logits)
    assert set(loaded.weights()) == set(adapted.weights_for_engine())
    assert adapted.model.model.layers[0].mlp.down_proj.left.requires_grad  # as it was


def test_an_update_moves_the_adapter_alone_and_shares_prefixes(adapted):
    assert adapted.shares_prefixes
    batch = collate([[5, 6, 7, 8]] * 3, [[9, 10], [9, 11, 12], [13]], pad_id=1)
    before = {name: tensor.clone() for name, tensor in adapted.weights().items()}
    with torch.no_grad():
        logits = adapted.model(input_ids=batch["input_ids"]).logits.log_softmax(-1)
    plain = logits.gather(-1, batch["labels"][..., None]).squeeze(-1) * batch["response_mask"]
    ours = get_response_log_probs(adapted, batch["input_ids"], batch["labels"], response_mask=batch["response_mask"])
    torch.testing.assert_close(ours["log_probs"], plain, atol=1e-5, rtol=1e-5)
    optimizer = make_optimizer(adapted, learning_rate=1e-2)
    metrics = train_update(adapted, optimizer, batch, learning_rate=1e-2, micro_batch_size=3)
    assert metrics["update/shared"] > 0
    assert metrics["optimizer/grad_norm"] > 0
    moved = {name for name, tensor in adapted.weights().items() if not tensor.equal(before[name])}
    assert moved == set(adapted.trainable_parameters())
    assert len(moved) == 8
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in adapted.trainable_parameters().values()
    }


def test_a_model_that_peft_has_marked_is_saved_as_the_merged_model(adapted, tmp_path):
    adapted.model._hf_peft_config_loaded = True  # transformers would then save the adapter alone, with peft
    adapted.save(tmp_path / "model")
    assert adapted.model._hf_peft_config_loaded
    assert set(load_policy(tmp_path / "model").weights()) == set(adapted.weights_for_engine())


def with_critic(model, tokenizer=None, *, own=False):
    """A policy with a critic whose values are not 0, on the policy's own hidden states or on those of a second model."""
    policy = Policy(model, tokenizer)
    policy.critic = Critic(policy, Policy(copy.deepcopy(model)) if own else None)
    with torch.no_grad():
        policy.critic.head.weight.copy_(torch.linspace(-1, 1, model.config.hidden_size))
        policy.critic.head.bias.fill_(0.5)
        for parameter in policy.critic.body.model.parameters() if own else ():
            parameter.mul_(0.5)
    return policy


def value_loss(inputs):
    """The squared distance of the values from 2."""
    return LossOutputs((inputs.values - 2) ** 2)


def shared_critic(tiny_model, tiny_tokenizer):
    return with_critic(copy.deepcopy(tiny_model), tiny_tokenizer)


def own_critic(tiny_model, tiny_tokenizer):
    return with_critic(copy.deepcopy(tiny_model), tiny_tokenizer, own=True)


@pytest.mark.parametrize("make", [adapt, shared_critic, own_critic])
def test_a_resumed_run_has_every_bit_of_what_it_trained(make, tiny_model, tiny_tokenizer, tmp_path):
    def train(policy, optimizer, step):
        batch = collate([[5, 6, 7, step]] * 2, [[9, 10], [9, 11, 12]], pad_id=1)
        how = {"objective": value_loss} if make is not adapt else {}
        train_update(policy, optimizer, batch, learning_rate=1e-2, micro_batch_size=2, **how)

    def state(policy, optimizer):
        moments = {
            f"{name}/{key}": tensor.clone()
            for name, parameter in policy.trainable_parameters().items()
            for key, tensor in optimizer.state[parameter].items()
        }
        return {name: tensor.clone() for name, tensor in policy.weights().items()} | moments

    policy = make(tiny_model, tiny_tokenizer)
    optimizer = make_optimizer(policy, learning_rate=1e-2)
    start = {name: tensor.clone() for name, tensor in policy.weights().items()}
    train(policy, optimizer, 1)
    path = save_checkpoint(tmp_path, step=1, policy=policy, optimizer=optimizer, state={})
    written = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert written <= checkpoint_bytes(policy, optimizer)
    saved = state(policy, optimizer)
    trained = {name for name, tensor in start.items() if not tensor.equal(saved[name])}
    assert set(policy.trainable_parameters()) & trained
    train(policy, optimizer, 2)

    resumed = make(tiny_model, tiny_tokenizer)
    with torch.no_grad():
        for tensor in resumed.weights().values():
            tensor.add_(1.0)
    again = make_optimizer(resumed, learning_rate=1e-2)
    checkpoint, notices = load_checkpoint(tmp_path, policy=resumed, optimizer=again)
    assert (checkpoint.step, notices) == (1, [])
    found = state(resumed, again)
    assert found.keys() == saved.keys()
    assert all(found[name].equal(saved[name]) for name in saved)
    train(resumed, again, 2)
    expected, ends = state(policy, optimizer), state(resumed, again)
    assert all(ends[name].equal(expected[name]) for name in expected)

    ids = torch.arange(20).view(2, 10)  # what lies in the checkpoint is a model that samples the same
    policy.load_weights({name: saved[name] for name in policy.weights()})
    with torch.no_grad():
        logits = load_policy(path / "model").forward(input_ids=ids).logits
        torch.testing.assert_close(logits, policy.forward(input_ids=ids).logits)


def test_a_checkpoint_of_a_plain_policy_does_not_fit_an_adapted_one(adapted, tiny_model, tiny_tokenizer, tmp_path):
    plain = Policy(tiny_model, tiny_tokenizer)
    for run, writer, reader in ((tmp_path / "a", plain, adapted), (tmp_path / "b", adapted, plain)):
        run.mkdir()
        how = [make_optimizer(policy, learning_rate=1e-2) for policy in (writer, reader)]
        save_checkpoint(run, step=1, policy=writer, optimizer=how[0], state={})
        before = {name: tensor.clone() for name, tensor in reader.weights().items()}
        with pytest.raises(RlvrError, match=r"does not fit the model: .*\.left is") as caught:
            load_checkpoint(run, policy=reader, optimizer=how[1])
        assert ("is not in it" if writer is plain else "is in it and not in the model") in caught.value.problem
        assert all(tensor.equal(before[name]) for name, tensor in reader.weights().items())


# --- a critic


@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
@pytest.mark.parametrize(
    ("rows", "chunk_size"),
    [
        ([0, 1, 2, 3], None),
        ([0, 1, 2, 3], 7),
        ([3], 7),
        *(slow(rows, size) for rows in ([0, 1], [2, 0]) for size in (None, 7)),
        slow([3], None),
    ],
)
def test_values_are_those_of_the_plain_forward_pass(tiny_model, chunk_size, rows, own):
    policy = with_critic(tiny_model.double(), own=own)
    batch = collate([[5, 6, 7, 8]] * 3 + [[3]], [[9, 10], [9, 11, 12], [13], [2, 3, 4, 5, 6]], pad_id=1)
    ids, labels, mask = (batch[name][rows] for name in ("input_ids", "labels", "response_mask"))
    assert policy.shares_prefixes
    scores = get_response_log_probs(policy, ids, labels, response_mask=mask, chunk_size=chunk_size)
    with torch.no_grad():
        body = policy.networks[-1].model.base_model
        plain = policy.critic.head(body(input_ids=ids).last_hidden_state).squeeze(-1) * mask
    assert scores["values"].requires_grad
    torch.testing.assert_close(scores["values"].detach(), plain, atol=1e-6, rtol=1e-6)  # the norms are in float32


def test_a_policy_without_a_critic_has_no_values(tiny_model):
    ids = torch.arange(6).view(1, 6)
    assert set(get_response_log_probs(tiny_model, ids, ids)) == {"log_probs"}


def test_an_objective_trains_on_the_values(tiny_model, tiny_tokenizer):
    batch = collate([[5, 6, 7, 8]] * 3 + [[3]], [[9, 10], [9, 11, 12], [13], [2, 3, 4, 5, 6]], pad_id=1)
    ends = []
    for size in (1, 2, 4):
        policy = with_critic(copy.deepcopy(tiny_model).double(), tiny_tokenizer)
        before = {name: p.detach().clone() for name, p in policy.trainable_parameters().items()}
        gradients = {}

        def keep(*_, policy=policy, gradients=gradients):
            gradients |= {name: p.grad.clone() for name, p in policy.trainable_parameters().items()}

        optimizer = torch.optim.SGD(policy.trainable_parameters().values(), lr=0.1)
        optimizer.register_step_pre_hook(keep)
        how = {"objective": value_loss, "max_grad_norm": float("inf")}
        metrics = train_update(policy, optimizer, batch, learning_rate=0.1, micro_batch_size=size, **how)
        assert all(gradients[f"critic.head.{name}"].abs().max() > 0 for name in ("weight", "bias"))
        after = policy.trainable_parameters()
        assert all(
            not after[name].equal(before[name]) for name in ("critic.head.weight", "model.layers.0.mlp.up_proj.weight")
        )
        ends.append(gradients | {"loss": torch.tensor(metrics["loss/objective"], dtype=torch.float64)})

    policy = with_critic(copy.deepcopy(tiny_model).double())
    hidden = policy.model.base_model(input_ids=batch["input_ids"]).last_hidden_state
    loss = ((policy.critic.head(hidden).squeeze(-1) - 2) ** 2)[batch["response_mask"]].mean()
    loss.backward()
    expected = {name: p.grad for name, p in policy.trainable_parameters().items() if p.grad is not None}
    for found in ends:
        assert found.keys() == {*expected, "loss"}
        torch.testing.assert_close(found["loss"], loss.detach().double(), atol=1e-6, rtol=1e-6)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)


def test_values_do_not_need_a_linear_head(tiny_model):
    """The logits of a model with soft capping come from its own forward pass, the values from its hidden states."""
    config = Gemma2Config(
        vocab_size=41, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, final_logit_softcapping=2.0,
    )  # fmt: skip
    policy = with_critic(Gemma2ForCausalLM(config).eval())
    ids, mask = torch.arange(10).view(2, 5), torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0]]).bool()
    with pytest.warns(UserWarning, match="not one linear map"):
        assert policy.head() is None
    scores = get_response_log_probs(policy, ids, ids, response_mask=mask)
    plain = policy.critic.head(policy.body(input_ids=ids).last_hidden_state).squeeze(-1) * mask
    torch.testing.assert_close(scores["values"], plain)


def test_tied_weights_are_one_tensor(tiny_model):
    weights = as_policy(tiny_model).weights_for_engine()
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(weights)
    assert set(weights) - set(distinct_tensors(weights)) == {"lm_head.weight"}
