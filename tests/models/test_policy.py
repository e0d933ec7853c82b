"""models.py: what loads, what is refused and in which words, and that what is saved is whole."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import builtin_model_path, model_identity
from rlvr_cli.models.policy import Policy, load_policy


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
    assert load_policy(tiny_model_dir, dtype=dtype, device="cpu").model.dtype == getattr(torch, dtype)


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
    """Unpickling it would leave a trace."""

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


def test_safetensors_beside_a_pickle_are_what_is_loaded(broken, tmp_path):
    torch.save(Evil(tmp_path / "trace"), broken / "pytorch_model.bin")
    load_policy(broken)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("model_type", ["qwen2", "of_its_own"])
def test_code_in_the_repository_is_never_run(broken, tmp_path, model_type):
    trace = tmp_path / "trace"
    (broken / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    own = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", "evil.T"]}
    edit_config(broken, model_type=model_type, auto_map=own)
    edit = broken / "tokenizer_config.json"
    edit.write_text(json.dumps({**json.loads(edit.read_text()), "auto_map": own}))
    if model_type == "qwen2":
        assert type(load_policy(broken).model).__module__.startswith("transformers.")
    else:
        assert "code of its own" in refusal(broken).problem
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
    deeper = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    assert "model.layers.2" in damaged("layers", lambda d: edit_config(d, **deeper))
    wider = damaged("width", lambda d: edit_config(d, intermediate_size=128))
    assert "mlp" in wider
    assert "(64, 32) and should be (128, 32)" in wider or "(32, 64) and should be (32, 128)" in wider
    assert "has model type `zork`" in damaged("type", lambda d: edit_config(d, model_type="zork"))
    assert "hidden_size" in damaged("field", lambda d: edit_config(d, hidden_size="x"))
    assert "cannot be loaded" in damaged("kind", lambda d: edit_config(d, model_type="t5"))


def test_a_tokenizer_of_another_model(broken):
    tokenizer = AutoTokenizer.from_pretrained(broken)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(broken)
    error = refusal(broken)
    assert "ids up to 320" in error.problem
    assert "320 embeddings" in error.problem


def test_choices_that_do_not_exist(tiny_model_dir):
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
def test_a_generation_config_that_contradicts_itself_does_not_cost_the_model(
    tiny_model, tiny_tokenizer, tmp_path, settings, kept
):
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


def test_identity_is_of_the_weights(tiny_model_dir, tiny_model, tmp_path):
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
    assert {**model_identity(copy), "path": ""} == {**identity, "path": ""}
    assert model_identity("some-org/no-such-model") == {"id": "some-org/no-such-model", "revision": None}
    with pytest.raises(RlvrError, match="no model directory"):
        model_identity(tmp_path / "nothing")


def test_identity_of_weights_in_several_files(tiny_model, tiny_tokenizer, tmp_path):
    tiny_model.save_pretrained(tmp_path / "parts", max_shard_size="40KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    identity = model_identity(tmp_path / "parts")
    assert identity["parameters"] == tiny_model.num_parameters()
    tiny_tokenizer.save_pretrained(tmp_path / "parts")
    model = load_policy(tmp_path / "parts").model
    assert all(p.equal(q) for p, q in zip(model.parameters(), tiny_model.parameters(), strict=True))


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


def test_a_downloaded_model_is_loaded_and_identified_by_its_revision(downloaded, tiny_model_dir, tiny_model):
    model = load_policy("org/tiny").model
    assert all(p.equal(q) for p, q in zip(model.parameters(), tiny_model.parameters(), strict=True))
    expected = model_identity(tiny_model_dir)
    del expected["path"]
    assert model_identity("org/tiny") == {"id": "org/tiny", "revision": COMMIT, **expected}


def test_a_downloaded_pickle_is_never_opened(downloaded, tmp_path):
    (downloaded / "model.safetensors").unlink()
    torch.save(Evil(tmp_path / "trace"), downloaded / "pytorch_model.bin")
    assert "org/tiny" in refusal("org/tiny").problem
    assert not (tmp_path / "trace").exists()


def test_the_builtin_model_lies_in_the_package():
    assert builtin_model_path().parts[-3:] == ("rlvr_cli", "assets", "tiny-math")
