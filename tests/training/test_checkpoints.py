"""Checkpoints: what is saved comes back to the bit, and whatever dies or breaks, an intact checkpoint is what loads."""

import copy
import functools
import hashlib
import itertools
import json
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

from disks import largest_file
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.policy import Policy
from rlvr_cli.models.tokens.tokenization import collate
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.schemas import NewerVersion
from rlvr_cli.training import checkpoints
from rlvr_cli.training.checkpoints import check_space_for_training, checkpoint_bytes, load_checkpoint, save_checkpoint
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.updates.update import train_update

WRITING = ("checkpoint", "checkpoint.torn", "write", "write.torn", "rename", "renamed", "checkpoint.rename")
REPLACED = ("checkpoint.renamed", "prune", "prune.torn")  # passed when the new checkpoint is in place


class Trainer(NamedTuple):
    model: Any
    optimizer: torch.optim.Optimizer
    tokenizer: Any

    def train(self, step: int) -> None:
        """The update after which the run is at `step`; a function of the step, the weights and the optimizer's state."""
        draw = torch.Generator().manual_seed(step)
        rows = [torch.randint(2, 300, (9,), generator=draw).tolist() for _ in range(3)]
        batch = collate([row[:3] for row in rows], [row[3:] for row in rows], pad_id=1)
        train_update(self.model, self.optimizer, batch, learning_rate=1e-2 / step, micro_batch_size=2)

    def save(self, run: Path, step: int, **options: Any) -> Path:
        options = {"state": {"cursor": step}, **options}
        return save_checkpoint(
            run, step=step, policy=Policy(self.model, self.tokenizer), optimizer=self.optimizer, **options
        )

    def load(self, run: Path) -> tuple[Any, list[str]]:
        return load_checkpoint(run, policy=Policy(self.model), optimizer=self.optimizer)

    def digest(self) -> str:
        """Of every bit of the weights and of the optimizer's state."""
        tensors = dict(self.model.state_dict())
        for index, parameter in enumerate(self.model.parameters()):
            tensors |= {f"{index}/{key}": tensor for key, tensor in self.optimizer.state.get(parameter, {}).items()}
        return digest_of(tensors)


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@functools.cache
def loaded(directory: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model in a directory, to be copied, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True).eval()
    return model, AutoTokenizer.from_pretrained(directory, local_files_only=True)


def trainer_of(directory: Path, dtype: torch.dtype = torch.float32, **optimizer: Any) -> Trainer:
    model, tokenizer = loaded(directory, dtype)
    model = copy.deepcopy(model)
    return Trainer(model, make_optimizer(model, learning_rate=1e-2, **optimizer), tokenizer)


def names_in(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def tree_of(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}


@pytest.fixture
def trainer(tiny_model_dir: Path) -> Trainer:
    return trainer_of(tiny_model_dir)


@pytest.fixture(scope="module")
def history(tiny_model_dir: Path) -> list[str]:
    """The digests of an uninterrupted run after its steps 0 to 4."""
    uninterrupted = trainer_of(tiny_model_dir)
    digests = [uninterrupted.digest()]
    for step in range(1, 5):
        uninterrupted.train(step)
        digests.append(uninterrupted.digest())
    assert len(set(digests)) == 5
    return digests


@pytest.fixture(scope="module")
def prototype(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of its steps 1 and 2; not to be written to."""
    run = tmp_path_factory.mktemp("prototype")
    trainer = trainer_of(tiny_model_dir)
    for step in (1, 2):
        trainer.train(step)
        trainer.save(run, step, tensors={"logprobs": torch.tensor([-0.5, step])})
    return run


@pytest.fixture
def run(prototype: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prototype, tmp_path / "run")


# --- what comes back


def test_a_run_that_goes_on_ends_with_the_weights_of_one_that_never_stopped(
    tiny_model_dir: Path, tmp_path: Path, history: list[str]
):
    for step in range(1, 5):
        trainer = trainer_of(tiny_model_dir)
        embeddings, place = trainer.model.get_input_embeddings().weight, trainer.model.lm_head.weight.data_ptr()
        loaded, notices = trainer.load(tmp_path)
        assert notices == []
        assert (loaded.step, loaded.state) == (step - 1, {"cursor": step - 1}) if loaded else step == 1
        assert trainer.digest() == history[step - 1]
        assert trainer.model.get_input_embeddings().weight is embeddings
        assert trainer.model.lm_head.weight.data_ptr() == embeddings.data_ptr() == place  # tied as before
        trainer.train(step)
        assert trainer.digest() == history[step]
        assert trainer.save(tmp_path, step) == tmp_path / "checkpoints" / f"step-{step:06d}"


def test_loading_replaces_what_the_model_and_the_optimizer_held(run: Path, trainer: Trainer, history: list[str]):
    for step in (7, 8, 9):
        trainer.train(step)
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    trainer.load(run)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == rates
    assert trainer.digest() == history[2]


def test_an_optimizer_that_made_no_step_yet(tiny_model_dir: Path, trainer: Trainer, tmp_path: Path, history: list[str]):
    trainer.save(tmp_path, 0)
    other = trainer_of(tiny_model_dir)
    other.train(9)
    loaded, _ = other.load(tmp_path)
    assert loaded.step == 0
    assert not other.optimizer.state
    other.train(1)
    assert other.digest() == history[1]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw_kahan": {"kind": "adamw_kahan"},
    "adamw_8bit": {"kind": "adamw_8bit"},
    "offloaded": {"offload": True},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_every_optimizer_comes_back_to_the_bit(tiny_model_dir: Path, tmp_path: Path, dtype, optimizer):
    first, second = (trainer_of(tiny_model_dir, dtype, **optimizer) for _ in range(2))
    first.train(1)
    path = first.save(tmp_path, 1)
    taken = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    assert taken <= checkpoint_bytes(Policy(first.model), first.optimizer)
    second.load(tmp_path)
    assert second.model.dtype == dtype
    assert first.digest() == second.digest()
    for trainer in (first, second):
        trainer.train(2)
    assert first.digest() == second.digest()


@pytest.mark.parametrize(("writer", "reader"), [*itertools.pairwise([*OPTIMIZERS, "adamw"])])
def test_the_state_of_another_optimizer_is_refused(tiny_model_dir: Path, tmp_path: Path, writer: str, reader: str):
    one, other = (trainer_of(tiny_model_dir, torch.bfloat16, **OPTIMIZERS[name]) for name in (writer, reader))
    one.train(1)
    one.save(tmp_path, 1)
    problem = refusal(other, tmp_path)
    assert "optimizer" in problem


def test_a_mixture_of_experts_whose_files_name_its_weights_otherwise(trainer: Trainer, tmp_path: Path):
    def mixture(seed: int) -> Trainer:
        torch.manual_seed(seed)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_local_experts": 4}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
        ids = {"vocab_size": 320, "eos_token_id": 0, "pad_token_id": 1, "bos_token_id": None}
        model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, **ids)).eval()
        return Trainer(model, make_optimizer(model, learning_rate=1e-2), trainer.tokenizer)

    with torch.random.fork_rng():
        first, second = mixture(0), mixture(1)
    first.train(1)
    first.save(tmp_path, 1)
    assert first.digest() != second.digest()
    second.load(tmp_path)
    for one in (first, second):
        one.train(2)
    assert first.digest() == second.digest()


def test_the_callers_tensors_and_state(trainer: Trainer, tmp_path: Path):
    square = torch.arange(6.0).reshape(2, 3)
    tensors = {
        "a row/with spaces": square[0],
        "shares its memory": square[1],
        "transposed": square.T,
        "not numbers": torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0]),
        "half": torch.tensor([1 / 3], dtype=torch.bfloat16),
        "mask": torch.tensor([[True, False]]),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 4),
        "with a graph": torch.ones(2, requires_grad=True) * 2,
    }
    state = {"epoch": 1, "reward": 0.1 + 0.2, "order": [3, 1, 2], "name": "naïve \ud83d\n", "none": None}
    trainer.save(tmp_path, 3, state=state, tensors=tensors)
    loaded, _ = trainer.load(tmp_path)
    assert loaded.state == state
    assert digest_of(loaded.tensors) == digest_of(tensors)
    trainer.save(tmp_path, 4)
    loaded, _ = trainer.load(tmp_path)
    assert loaded.tensors == {}


def test_the_model_is_a_policy_as_it_stands(run: Path, trainer: Trainer):
    trainer.load(run)
    policy = load_policy(run / "checkpoints/step-000002/model")
    assert digest_of(policy.model.state_dict()) == digest_of(trainer.model.state_dict())
    assert policy.tokenizer.get_vocab() == trainer.tokenizer.get_vocab()


def test_saving_and_loading_draw_no_random_number(run: Path, trainer: Trainer):
    before = torch.get_rng_state()
    assert trainer.load(run)[0].step == 2
    trainer.save(run, 3)
    assert torch.get_rng_state().equal(before)


def test_what_was_loaded_does_not_hold_on_to_the_files(run: Path, trainer: Trainer):
    loaded, _ = trainer.load(run)
    assert str(run) not in Path("/proc/self/maps").read_text()
    shutil.rmtree(run)
    assert loaded.tensors["logprobs"].tolist() == [-0.5, 2]


# --- which ones are there


def test_the_newest_two_are_kept(trainer: Trainer, tmp_path: Path):
    for step in (5, 10, 999_999, 1_000_000):
        trainer.save(tmp_path, step)
    assert names_in(tmp_path) == ["step-1000000", "step-999999"]
    trainer.save(tmp_path, 1_000_001, keep=1)
    assert names_in(tmp_path) == ["step-1000001"]


def test_saving_a_step_again_replaces_it(run: Path, trainer: Trainer):
    trainer.load(run)
    trainer.save(run, 2, state={"again": True})
    assert names_in(run) == ["step-000001", "step-000002"]
    loaded, notices = trainer.load(run)
    assert loaded is not None
    assert (loaded.step, loaded.state, loaded.tensors, notices) == (2, {"again": True}, {}, [])


def test_a_run_that_went_back_removes_what_lies_ahead_of_it(run: Path, trainer: Trainer):
    trainer.save(run, 5)
    (run / "checkpoints/step-000005/state.json").unlink()
    assert trainer.load(run)[0].step == 2
    trainer.save(run, 3)
    assert names_in(run) == ["step-000002", "step-000003"]


def test_without_checkpoints_there_is_nothing_to_load(trainer: Trainer, tmp_path: Path, history: list[str]):
    assert trainer.load(tmp_path) == (None, [])
    (tmp_path / "checkpoints").mkdir()
    assert trainer.load(tmp_path) == (None, [])
    assert trainer.digest() == history[0]


def test_a_replacement_cut_short_between_its_two_renames(run: Path, trainer: Trainer, history: list[str]):
    folder = run / "checkpoints"
    shutil.copytree(folder / "step-000002", folder / ".step-000002.tmp")
    (folder / "step-000002").rename(folder / ".step-000002.old")
    assert trainer.load(run)[0].step == 2
    assert trainer.digest() == history[2]
    assert names_in(run) == ["step-000001", "step-000002"]
    shutil.copytree(folder / "step-000002", folder / ".step-000002.old")  # after the second
    assert trainer.load(run)[0].step == 2
    assert names_in(run) == ["step-000001", "step-000002"]


# --- damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        Path.unlink,
        *(pytest.param(how, marks=pytest.mark.slow) for how in (truncate, empty, zero, append, make_fifo)),
    ],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_file_is_named_and_the_older_checkpoint_loaded(
    run: Path, trainer: Trainer, history: list[str], damage: Callable[[Path], None]
):
    newest = run / "checkpoints/step-000002"
    whole = shutil.copytree(newest, run / "whole")
    files = [p.relative_to(whole) for p in whole.rglob("*") if p.is_file()]
    assert {"optimizer.safetensors", "tensors.safetensors", "state.json", "model/config.json"} <= set(map(str, files))
    assert len({(newest / file).stat().st_mode for file in files}) == 1
    for file in files:
        damage(newest / file)
        loaded, (notice,) = trainer.load(run)
        assert (loaded.step, loaded.state) == (1, {"cursor": 1})
        assert loaded.tensors["logprobs"].tolist() == [-0.5, 1]
        assert trainer.digest() == history[1]
        assert str(newest / file) in notice
        assert notice.endswith("goes on from step-000001 instead.")
        shutil.rmtree(newest)
        shutil.copytree(whole, newest)
    assert trainer.load(run)[0].step == 2


@pytest.mark.parametrize("apart", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flipped_bit_of_the_state_is_noticed(trainer: Trainer, run: Path, history: list[str], apart: int):
    shutil.rmtree(run / "checkpoints/step-000001")
    path = run / "checkpoints/step-000002/state.json"
    data = path.read_bytes()
    for position in range(0, len(data), apart):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        loaded, notices = trainer.load(run)
        assert loaded is None, (position, damaged[position])
        assert str(path) in notices[0]
    assert trainer.digest() == history[0]


def test_nothing_more_than_was_written_is_a_checkpoint(run: Path, trainer: Trainer):
    stranger = run / "checkpoints/step-000002/model/adapter.safetensors"
    stranger.write_bytes(b"")
    loaded, (notice,) = trainer.load(run)
    assert loaded.step == 1
    assert str(stranger) in notice


def test_a_checkpoint_under_the_name_of_another_step(run: Path, trainer: Trainer):
    (run / "checkpoints/step-000002").rename(run / "checkpoints/step-000009")
    loaded, (notice,) = trainer.load(run)
    assert loaded.step == 1
    assert "step-000009/state.json" in notice


def test_a_checkpoint_of_another_run_is_not_used(run: Path, trainer: Trainer, tmp_path: Path):
    """Wherever the run is now; those that do not say whose they are, as of older versions, are."""
    own, other = tmp_path / "own", tmp_path / "other"
    state = {}
    for path in (own, other):
        with RunDir.create(tmp_path, "grpo", name=path.name, metadata={}) as made:
            state[path] = {"position": {}, "run_created_at": made.metadata["created_at"]}
    shutil.copytree(run / "checkpoints", own / "checkpoints")
    assert trainer.load(own)[0].step == 2
    trainer.save(own, 3, state=state[own])
    path = own.rename(tmp_path / "renamed") / "checkpoints/step-000004"
    trainer.save(other, 4, state=state[other]).rename(path)
    loaded, notices = trainer.load(tmp_path / "renamed")
    assert loaded.step == 3
    problem = f"{path} is a checkpoint of another run, which was created at {state[other]['run_created_at']}."
    assert notices == [f"{problem} Training goes on from step-000003 instead."]
    assert checkpoints.check_checkpoints(tmp_path / "renamed")[1] == [problem]
    assert checkpoints.newest_position(tmp_path / "renamed") == (3, {})


def rewrite_version(path: Path, version: int) -> None:
    """Give a checkpoint another schema version, and a state.json that is whole."""
    record = json.loads((path / "state.json").read_text()) | {"schema_version": version}
    del record["sha256"]
    (path / "state.json").write_bytes(checkpoints._encoded(record))


def test_a_checkpoint_of_an_older_schema_version_loads(
    run: Path, trainer: Trainer, history: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checkpoints, "SCHEMA_VERSION", checkpoints.SCHEMA_VERSION + 1)
    loaded, notices = trainer.load(run)
    assert (loaded.step, notices) == (2, [])
    assert trainer.digest() == history[2]


def test_a_checkpoint_of_a_newer_schema_version_asks_for_an_upgrade(run: Path, trainer: Trainer, history: list[str]):
    newest, before = run / "checkpoints/step-000002", tree_of(run)
    rewrite_version(newest, checkpoints.SCHEMA_VERSION + 1)
    with pytest.raises(NewerVersion, match="step-000002 was written by a newer rlvr") as caught:
        trainer.load(run)
    assert "Upgrade" in caught.value.hint
    assert tree_of(run).keys() == before.keys()  # nothing was removed
    assert trainer.digest() == history[0]
    rewrite_version(newest, 0)
    loaded, (notice,) = trainer.load(run)
    assert loaded.step == 1
    assert "its schema_version or step" in notice


def test_when_none_is_intact_training_starts_over(run: Path, trainer: Trainer, history: list[str]):
    flip(run / "checkpoints/step-000001/optimizer.safetensors")
    empty(run / "checkpoints/step-000002/model/tokenizer.json")
    loaded, notices = trainer.load(run)
    assert loaded is None
    assert "step-000002/model/tokenizer.json" in notices[0]
    assert "step-000001/optimizer.safetensors" in notices[1]
    assert "starts over from the stored rollouts" in notices[2]
    assert trainer.digest() == history[0]


def test_links_are_not_followed(run: Path, trainer: Trainer, tmp_path: Path):
    folder = run / "checkpoints"
    for name in ("model/model.safetensors", "state.json", "model", "."):
        inside, outside = folder / "step-000002" / name, tmp_path / "outside"
        inside.rename(outside)
        inside.symlink_to(outside)
        loaded, (notice,) = trainer.load(run)
        assert loaded.step == 1
        assert f"{inside} is a symbolic link" in notice
        if name == ".":
            with pytest.raises(RlvrError, match="is a symbolic link"):
                trainer.save(run, 2)
            trainer.save(run, 3, keep=1)  # leaves what it has not written
            assert (outside / "state.json").exists()
        inside.unlink()
        outside.rename(inside)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    for refused in (trainer.load, lambda run: trainer.save(run, 4)):
        with pytest.raises(RlvrError, match="checkpoints is a symbolic link"):
            refused(run)


# --- what does not fit


def refusal(trainer: Trainer, run: Path) -> str:
    """The problem, which leaves model and optimizer as they were."""
    before = trainer.digest()
    with pytest.raises(RlvrError) as caught:
        trainer.load(run)
    assert trainer.digest() == before
    assert caught.value.hint
    return caught.value.problem


def test_a_checkpoint_of_another_model_is_refused(run: Path, trainer: Trainer, tiny_model_dir: Path):
    config = copy.deepcopy(trainer.model.config)
    config.intermediate_size = 128
    wider = type(trainer.model)(config)
    problem = refusal(Trainer(wider, make_optimizer(wider, learning_rate=1.0), trainer.tokenizer), run)
    assert "model.layers.0.mlp.gate_proj.weight is (64, 32) in it and (128, 32) in the model" in problem

    config = copy.deepcopy(trainer.model.config)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    shallower = type(trainer.model)(config)
    problem = refusal(Trainer(shallower, make_optimizer(shallower, learning_rate=1.0), trainer.tokenizer), run)
    assert "model.layers.1" in problem


def test_weights_that_would_lose_bits_are_refused(trainer: Trainer, tiny_model_dir: Path, tmp_path: Path):
    trainer.train(1)
    trainer._replace(optimizer=make_optimizer(trainer.model, learning_rate=1.0)).save(tmp_path, 1)
    problem = refusal(trainer_of(tiny_model_dir, torch.bfloat16), tmp_path)
    assert "model.embed_tokens.weight has bits that torch.bfloat16 cannot hold" in problem


def test_an_optimizer_of_other_parameters_is_refused(run: Path, trainer: Trainer):
    trainer.model.model.norm.weight.requires_grad_(False)
    fewer = trainer._replace(optimizer=make_optimizer(trainer.model, learning_rate=1.0))
    assert "model.norm.weight/" in refusal(fewer, run)


def test_the_state_of_another_precision_is_refused(trainer: Trainer, tiny_model_dir: Path, tmp_path: Path):
    half = trainer_of(tiny_model_dir, torch.bfloat16)
    half.train(1)
    half.save(tmp_path, 1)  # float32 can hold its weights, but a run that goes on must not change its rounding
    problem = refusal(trainer, tmp_path)
    assert "exp_avg" in problem
    assert "torch.bfloat16" in problem


# --- what is not written


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_not_saved(run: Path, trainer: Trainer, value: float):
    before = tree_of(run)
    for number, name in enumerate(("model.norm.weight", "model.layers.1.mlp.up_proj.weight")):
        with torch.no_grad():
            trainer.model.get_parameter(name).view(-1)[number - 1] = value
        with pytest.raises(RlvrError, match=f"weights hold NaN or infinity, first in {name}") as caught:
            trainer.save(run, 3)
        assert str(run / "checkpoints/step-000002") in str(caught.value)
    flip(run / "checkpoints/step-000002/state.json")
    with pytest.raises(RlvrError, match="checkpoints/step-000001"):
        trainer.save(run, 3)
    flip(run / "checkpoints/step-000002/state.json")
    assert tree_of(run) == before


def test_optimizer_state_that_is_not_finite_is_not_saved(trainer: Trainer, tmp_path: Path):
    trainer.train(1)
    trainer.optimizer.state[trainer.model.model.norm.weight]["exp_avg_sq"][3] = torch.nan
    with pytest.raises(RlvrError, match=r"state hold NaN or infinity, first in model.norm.weight/exp_avg_sq") as caught:
        trainer.save(tmp_path, 1)
    assert "no earlier checkpoint" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_noticed_before_anything_is_written(run: Path, trainer: Trainer):
    before = tree_of(run)
    huge = torch.zeros(1).expand(2**50)
    with pytest.raises(RlvrError) as caught:
        trainer.save(run, 3, tensors={"huge": huge})
    assert (
        f"takes {huge.nbytes + checkpoint_bytes(Policy(trainer.model), trainer.optimizer):,} bytes"
        in caught.value.problem
    )
    assert " are free" in caught.value.problem
    assert tree_of(run) == before


def test_the_space_that_a_checkpoint_takes(run: Path, trainer: Trainer):
    taken = sum(p.stat().st_size for p in (run / "checkpoints/step-000002").rglob("*") if p.is_file())
    assert taken <= checkpoint_bytes(Policy(trainer.model), trainer.optimizer) <= 2 * taken


@pytest.mark.parametrize(
    ("updates", "every", "lagging", "checkpoints", "model_is_there", "models"),
    [
        (5, 0, False, 0, False, 1),  # only the final model
        (1, 2, False, 1, False, 1),
        (5, 2, False, 3, False, 1),
        (5, 2, True, 3, False, 4),
        (500, 2, False, 3, False, 1),  # two are kept, a third is being written
        (0, 2, True, 0, True, 0),  # nothing is left to do
    ],
)
def test_space_for_all_of_a_run_is_asked_for_before_it_starts(
    trainer: Trainer, tmp_path: Path, monkeypatch, updates, every, lagging, checkpoints, model_is_there, models
):
    policy, how = Policy(trainer.model), {"updates": updates, "every": every, "lagging": lagging}
    model = sum(p.nbytes for p in trainer.model.parameters())  # tied weights once
    needed = checkpoints * checkpoint_bytes(policy, trainer.optimizer) + models * model
    if model_is_there:
        (tmp_path / "model").mkdir()
    for free in (needed, needed - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        if free >= needed:
            check_space_for_training(tmp_path, policy, trainer.optimizer, **how)
        else:
            with pytest.raises(
                RlvrError, match=f"needs {needed:,} bytes for checkpoints .*, and {free:,} are free"
            ) as caught:
                check_space_for_training(tmp_path, policy, trainer.optimizer, **how)
            assert "--runs-dir" in caught.value.hint


def test_the_space_of_checkpoints_that_are_there_is_not_asked_for_again(run: Path, trainer: Trainer, monkeypatch):
    policy = Policy(trainer.model)
    (run / "model").mkdir()
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=checkpoint_bytes(policy, trainer.optimizer))
    )
    assert names_in(run) == ["step-000001", "step-000002"]
    check_space_for_training(run, policy, trainer.optimizer, updates=100, every=1)


# --- faults


def test_files_that_the_system_refuses_to_write(run: Path, trainer: Trainer):
    trainer.load(run)
    sizes = {name: len(data) for name, data in tree_of(run / "checkpoints/step-000002").items()}
    before = tree_of(run)
    large = copy.deepcopy(trainer.tokenizer)
    large.add_tokens([f"<{i}>" for i in range(4000)])
    weights, moments = sizes["model/model.safetensors"], sizes["optimizer.safetensors"]
    for limit, tokenizer in ((10, large), (weights - 1, large), (weights, large), (moments - 1, trainer.tokenizer)):
        with largest_file(limit), pytest.raises(RlvrError, match=r"Cannot write .*step-000003: File too large"):
            trainer._replace(tokenizer=tokenizer).save(run, 3)
        assert tree_of(run) == before
        assert names_in(run) == ["step-000001", "step-000002"]
    with largest_file(moments):
        trainer.save(run, 3)


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("point", WRITING + REPLACED)
def test_a_full_disk_at_every_point(
    run: Path, trainer: Trainer, history: list[str], monkeypatch: pytest.MonkeyPatch, point: str, step: int
):
    for past in range(1, step + 1):
        trainer.train(past)
    before = tree_of(run)
    monkeypatch.setenv("RLVR_FAULT", f"{point}:1:enospc")
    if point == "prune" and step == 2:  # nothing to prune
        trainer.save(run, step)
    else:
        with pytest.raises(RlvrError, match=r"Cannot write .*: No space left on device"):
            trainer.save(run, step)
    monkeypatch.delenv("RLVR_FAULT")
    if point in WRITING:
        assert tree_of(run) == before
        assert names_in(run) == ["step-000001", "step-000002"]
    loaded, notices = trainer.load(run)
    assert loaded.step == (2 if point in WRITING else step)
    assert trainer.digest() == history[loaded.step]
    assert notices == []
    trainer.save(run, step)
    assert names_in(run) == [f"step-{step - 1:06d}", f"step-{step:06d}"]


@pytest.mark.parametrize(
    ("step", "points"),
    [
        (3, ("checkpoint.torn", "checkpoint.rename", "checkpoint.renamed", "prune.torn")),
        *(pytest.param(step, WRITING + REPLACED, marks=pytest.mark.slow) for step in (2, 3)),
    ],
    ids=["3-often", "2", "3"],
)
def test_killed_at_any_point_an_intact_checkpoint_loads(
    prototype: Path,
    trainer: Trainer,
    history: list[str],
    tiny_model_dir: Path,
    tmp_path: Path,
    step: int,
    points: tuple,
):
    for point in points:
        run = Path(shutil.copytree(prototype, tmp_path / point))
        if (child := os.fork()) == 0:
            save_and_die(run, tiny_model_dir, step=step, point=point)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == (0 if (point, step) == ("prune", 2) else -signal.SIGKILL), point
        loaded, notices = trainer.load(run)
        new = point in REPLACED
        assert (loaded.step, "by" in loaded.state, notices) == (step if new else 2, new, []), point
        assert trainer.digest() == history[loaded.step], point
        trainer.train(loaded.step + 1)
        trainer.save(run, loaded.step + 1)
        assert trainer.digest() == history[loaded.step + 1], point
        assert names_in(run) == [f"step-{loaded.step:06d}", f"step-{loaded.step + 1:06d}"], point


def test_the_newest_position_is_one_that_would_be_loaded(trainer: Trainer, tmp_path: Path):
    for step in (1, 2):
        trainer.save(tmp_path, step, state={"position": {"steps": step}})
    assert checkpoints.newest_position(tmp_path) == (2, {"steps": 2})
    state = tmp_path / "checkpoints/step-000002/state.json"
    for damaged in (state.read_text().replace('"steps": 2', '"steps": 98'), "[" * 9999):
        state.write_text(damaged)
        assert checkpoints.newest_position(tmp_path) == (1, {"steps": 1})
    shutil.rmtree(tmp_path / "checkpoints")
    assert checkpoints.newest_position(tmp_path) == (0, {})


def save_and_die(run: Path, model: Path, *, step: int, point: str) -> NoReturn:
    """Go on from the newest checkpoint and save one, in a process of its own."""
    status = 1
    try:
        victim = trainer_of(model)
        loaded, _ = victim.load(run)
        assert loaded is not None
        for number in range(loaded.step + 1, step + 1):
            victim.train(number)
        os.environ["RLVR_FAULT"] = f"{point}:1"
        victim.save(run, step, state={"by": "the victim"})
        status = 0
    finally:
        if status:
            traceback.print_exc()
        os._exit(status)
