"""The memory plan: terms by hand, a device that trainer and vLLM share, and what makes a run fit."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marks import slow
from rlvr_cli.cli import build
from rlvr_cli.config import config_of
from rlvr_cli.config.dpo import DpoConfig
from rlvr_cli.config.ei import EiConfig
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.config.ppo import PpoConfig
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.training.parallel.placement import place
from rlvr_cli.training.planning.memory import (
    CONTEXT,
    GPUS,
    GUESSED_PROMPT,
    HIDDEN,
    WORKSPACE,
    adapter_parameters,
    check_memory,
    gpus_line,
    host_note,
    memory_lines,
    memory_plan,
    options_that_fit,
)
from rlvr_cli.training.planning.plan import micro_batches_line
from shapes import SIZES, qwen, shape_of
from traced import traced

GIB = 2**30
QWEN_05B = {
    "parameters": 494_032_768, "layers": 24, "hidden": 896, "intermediate": 4864, "kv_width": 128, "vocabulary": 151936
}  # fmt: skip
QWEN_15B = {
    "parameters": 1_543_714_304, "layers": 28, "hidden": 1536, "intermediate": 8960, "kv_width": 256, "vocabulary": 151936
}  # fmt: skip
QWEN_7B = {
    "parameters": 7_615_616_512, "layers": 28, "hidden": 3584, "intermediate": 18944, "kv_width": 512, "vocabulary": 152064
}  # fmt: skip


def read_options(command, arguments):
    """The config of a command line."""
    given = build(command).make_context(command, [*arguments]).params
    flags = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v is not None}
    flags.pop("help_all", None)
    return resolve(config_of(command), flags=flags, command=command)


def one(capacity):
    return {"cuda:0": capacity}


@cache
def shape_of_size(size):
    return shape_of(qwen(size))


def plan_of(config, shape, *capacities, engine="vllm", rows=2):
    devices = {f"cuda:{i}": float(capacity) for i, capacity in enumerate(capacities)}
    placement = place(config.device, engine=engine, in_process=not config.async_steps, cuda_devices=[*devices])
    return memory_plan(config, shape, placement, engine=engine, rows=rows, capacities=devices)


def test_the_sampler_keeps_its_workspace_where_there_is_room():
    large, small, none = (
        plan_of(GrpoConfig(), QWEN_15B, *of, engine="transformers") for of in ([80 * GIB], [38 * GIB], [])
    )
    assert (large.keeps_workspace, small.keeps_workspace, none.keeps_workspace) == (True, False, False)
    assert small.fits, "it is given back instead"
    kept = sum(large.sampling[name] for name in ("key-value cache", "bfloat16 copy of the weights"))
    assert large.updating == {**small.updating, "what the sampler keeps": kept}
    assert not plan_of(GrpoConfig(), QWEN_15B, 80 * GIB).keeps_workspace, "vLLM has memory of its own"
    auto = GrpoConfig(micro_batch_tokens=0)
    beside, alone = (plan_of(auto, QWEN_15B, of * GIB, engine="transformers") for of in (80, 40))
    assert beside.keeps_workspace
    assert beside.micro_batch_tokens > 8192, "large enough micro-batches leave it its room"
    assert not alone.keeps_workspace
    for plan in (beside, alone):
        assert plan.capacity is not None
        assert 0.83 * plan.capacity < sum(plan.updating.values()) <= 0.9 * plan.capacity


@pytest.mark.parametrize("kind", [SftConfig, DpoConfig])
def test_what_samples_nothing_keeps_no_room_for_it(kind):
    given = kind(dataset="given.jsonl", micro_batch_tokens=0)
    evaluated, built_in = replace(given, eval_dataset="gsm8k"), replace(given, dataset="arithmetic")
    nothing, *others = (plan_of(c, QWEN_15B, 80 * GIB, engine="transformers") for c in (given, evaluated, built_in))
    placement = place("auto", engine="transformers", in_process=True, cuda_devices=["cuda:0"])
    assert "when sampling" not in memory_lines(nothing, placement, engine="transformers")
    assert "what the sampler keeps" not in nothing.updating
    for other in others:
        assert "when sampling" in memory_lines(other, placement, engine="transformers")
        assert other.micro_batch_tokens < nothing.micro_batch_tokens
    online = DpoConfig(dataset="questions.jsonl", n_dpo_steps=2)
    assert plan_of(online, QWEN_15B, engine="transformers").sampling


def test_an_adapter_takes_16_bytes_a_parameter_and_no_reference():
    shape = {
        "parameters": 1000, "layers": 2, "hidden": 8, "intermediate": 16, "query_width": 12, "kv_width": 4, "vocabulary": 32
    }  # fmt: skip
    adapter = 2 * 3 * ((8 + 12) + 2 * (8 + 4) + (12 + 8) + 3 * (8 + 16))
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        config = GrpoConfig(sampling_max_tokens=44, kl_coef=0.1, lora_rank=3, param_dtype=dtype)
        plan = plan_of(config, shape, engine="transformers", rows=3)
        assert plan.updating == {
            "weights": 1000 * width,
            "adapter": 4 * adapter,
            "gradients": 4 * adapter,
            "optimizer state": 8 * adapter,
            "activations of a micro-batch": 3 * 300 * 2 * (HIDDEN[width, width] * 8 + (64 + 21) * width),
            "logits": 4 * 3 * 300 * 32,
        }
    offloaded = plan_of(replace(config, offload_optimizer=True), shape, engine="transformers", rows=3)
    assert offloaded.host == {"optimizer state": 8 * adapter}
    assert "optimizer state" not in offloaded.updating
    small = plan_of(replace(config, optimizer="adamw_8bit"), shape, engine="transformers", rows=3)
    assert small.updating["optimizer state"] == (2 + 2 * 4 / 256) * adapter
    assert plan.state == 2000 + 16 * adapter
    config = GrpoConfig(lora_rank=32)
    assert options_that_fit(config, QWEN_7B, one(GPUS[24]), engine="transformers", rows=2) == (
        "--param-dtype bfloat16 --gradient-checkpointing"
    )
    assert options_that_fit(replace(config, lora_rank=0), QWEN_7B, one(GPUS[24]), engine="transformers", rows=2) == (
        "--param-dtype bfloat16 --lora-rank 32 --gradient-checkpointing"
    )


def test_an_mlp_without_a_gate_has_two_matrices():
    shape = {"parameters": 1000, "layers": 2, "hidden": 8, "intermediate": 16, "kv_width": 4, "vocabulary": 32}
    ungated = shape | {"gates": 0}
    assert adapter_parameters(shape, 3) - adapter_parameters(ungated, 3) == 2 * 3 * (8 + 16)
    config = GrpoConfig(fsdp=True, trainers=2)
    whole = [
        plan_of(config, sizes, engine="transformers", rows=3).updating["weights put together"]
        for sizes in (shape, ungated)
    ]
    layer, moved = 8 * 16 * (2 * 4 + 4), 2 * 8 * 16 * 2 * 4
    assert whole[0] - whole[1] == layer - moved


def test_a_critic_of_its_own_doubles_what_is_trained():
    shape = {
        "parameters": 1000, "layers": 2, "hidden": 8, "intermediate": 16, "query_width": 12, "kv_width": 4, "vocabulary": 32
    }  # fmt: skip
    for options in ({}, {"lora_rank": 3}, {"param_dtype": "bfloat16", "optimizer": "adamw_kahan"}):
        common = {"sampling_max_tokens": 44, "kl_coef": 0.1, "rollout_batch_size": 64, **options}
        own, shared = (
            plan_of(PpoConfig(critic=critic, **common), shape, engine="transformers", rows=3)
            for critic in ("own", "shared")
        )
        of_policy = shared.updating["weights"] + shared.updating.get("adapter", 0)
        twice = ("optimizer state", "activations of a micro-batch")
        assert own.updating == shared.updating | {name: 2 * shared.updating[name] for name in twice} | {
            "critic": of_policy,
            "gradients": own.updating["gradients"],
        }
        trained = shared.updating.get("adapter", 4000) if "lora_rank" in options else 4000
        assert own.updating["gradients"] - shared.updating["gradients"] == trained
        assert own.state > 1.9 * shared.state - shape["vocabulary"] * 8 * 4
        plain = plan_of(
            GrpoConfig(train_batch_size=64, gradient_accumulation_steps=1, **common),
            shape,
            engine="transformers",
            rows=3,
        )
        assert shared.updating == plain.updating, "a head is nothing"
        if not options:
            hosts = [
                plan_of(
                    PpoConfig(critic=critic, offload_optimizer=True, **common), shape, engine="transformers", rows=3
                ).host
                for critic in ("own", "shared")
            ]
            assert hosts[0] == {name: 2 * bytes for name, bytes in hosts[1].items()}


def test_terms_by_hand():
    shape = {"parameters": 1000, "layers": 2, "hidden": 8, "intermediate": 16, "kv_width": 4, "vocabulary": 32}
    config = GrpoConfig(sampling_max_tokens=44, rollout_batch_size=256, kl_coef=0.1)
    plan = plan_of(config, shape, engine="transformers", rows=3)
    assert plan.updating == {
        "weights": 4000,
        "gradients": 4000 + 4 * 32 * 8,
        "optimizer state": 8000,
        "reference model": 4000,
        "activations of a micro-batch": 3 * 300 * 2 * (80 + 64) * 4,
        "logits": 4 * 3 * 300 * 32,
    }
    assert plan.sampling == {
        "weights": 4000, "optimizer state": 8000, "reference model": 4000, "key-value cache": 256 * 300 * 2 * 2 * 4 * 4
    }  # fmt: skip
    assert plan.fits
    on_gpu = plan_of(config, shape, GIB * 80, engine="transformers", rows=3)
    halved = {"activations of a micro-batch": 3 * 300 * 2 * (32 * 8 + 4 * 16 * 2)}
    assert on_gpu.updating == {
        **plan.updating, **halved, "CUDA": CONTEXT, "bfloat16 copy of the weights": 2000,
        "what the sampler keeps": 2000 + 256 * 300 * 2 * 2 * 4 * 2,
    }  # fmt: skip
    again = plan_of(replace(config, gradient_checkpointing=True), shape, GIB * 80, engine="transformers", rows=3)
    assert again.updating["activations of a micro-batch"] == 3 * 300 * (
        2 * 8 * 4 + (32 * 8 + (4 + 3) * 16 * 2) - 4 * 32
    ), "of one layer, and of its gradients, what is more than the logits, which they take the place of"
    kahan = plan_of(GrpoConfig(param_dtype="bfloat16", optimizer="adamw_kahan"), shape, engine="transformers")
    assert kahan.updating["optimizer state"] == 3 * 2000
    half = plan_of(GrpoConfig(param_dtype="bfloat16"), shape, GIB * 80, engine="transformers")
    assert (half.updating["weights"], half.updating["optimizer state"]) == (2000, 4000)
    assert half.updating["gradients"] == 4000 + 2 * 32 * 8, "sums in float32, and the largest tensor"
    row = GUESSED_PROMPT + GrpoConfig().sampling_max_tokens
    assert half.updating["activations of a micro-batch"] == 2 * row * 2 * (22 * 8 + 4 * 16 * 2)
    for options, per_parameter in (({}, 2 + 1 / 32), ({"param_dtype": "bfloat16"}, 4 + 1 / 32)):
        small = plan_of(GrpoConfig(optimizer="adamw_8bit", **options), shape, engine="transformers")
        assert small.updating["optimizer state"] == 1000 * per_parameter
    assert "bfloat16 copy of the weights" not in half.updating


def test_beside_the_trainer_vllm_gets_what_it_leaves():
    """1.5B in float32 on 80 GB: 5.8 GiB of weights, 11.5 of moments and 1.5 of CUDA leave 60.4 of 79.2 GiB."""
    plan = plan_of(GrpoConfig(), QWEN_15B, 79.2 * GIB)
    assert plan.utilization == 0.76
    assert not plan.moves_state
    held = sum(plan.sampling.values())
    assert held == QWEN_15B["parameters"] * 12 + CONTEXT
    assert held + plan.utilization * 79.2 * GIB <= 79.2 * GIB
    assert plan_of(GrpoConfig(), QWEN_15B, 79.2 * GIB, 79.2 * GIB).utilization == 0.85


def test_the_optimizer_state_makes_room_for_the_cache_of_a_batch():
    """0.5B on 12 GiB: with the moments 5.0 GiB are left, and 256 responses of 1,280 tokens take 0.9 + 1 + 3.8."""
    config = GrpoConfig()
    plan = plan_of(config, QWEN_05B, 12 * GIB)
    assert plan.moves_state
    assert "optimizer state" not in plan.sampling
    assert "optimizer state" in plan.updating
    assert plan.utilization == pytest.approx((12 - 494_032_768 * 4 / GIB - 1.5) / 12, abs=0.01)
    assert not plan_of(config, QWEN_05B, 16 * GIB).moves_state
    assert not plan_of(
        GrpoConfig(rollout_batch_size=8, train_batch_size=8, gradient_accumulation_steps=4), QWEN_05B, 12 * GIB
    ).moves_state
    lines = memory_lines(plan, place("auto", engine="vllm", in_process=True, cuda_devices=["cuda:0"]), engine="vllm")
    assert lines["when sampling"].endswith("the optimizer state on the host; vLLM takes 72% of cuda:0")


def test_what_is_asked_for_is_taken_or_refused():
    assert plan_of(GrpoConfig(gpu_memory_utilization=0.3), QWEN_15B, 79.2 * GIB).utilization == 0.3
    assert plan_of(GrpoConfig(gpu_memory_utilization=0.9), QWEN_15B, 79.2 * GIB, 79.2 * GIB).utilization == 0.9
    offloading = plan_of(GrpoConfig(gpu_memory_utilization=0.85), QWEN_15B, 79.2 * GIB)
    assert (offloading.utilization, offloading.moves_state) == (0.85, True)
    with pytest.raises(RlvrError, match=r"0\.95 is more than the trainer leaves: 0\.9 of 79\.2 GiB"):
        plan_of(GrpoConfig(gpu_memory_utilization=0.95), QWEN_15B, 79.2 * GIB)
    with pytest.raises(RlvrError, match=r"vLLM needs 3\.9 GiB .* and gets 811 MiB of 79\.2 GiB"):
        plan_of(GrpoConfig(gpu_memory_utilization=0.01), QWEN_15B, 79.2 * GIB, 79.2 * GIB)


def test_a_model_that_leaves_nothing_for_vllm_is_refused():
    for options, hint in (
        ({}, "--engine transformers --lora-rank 32 --gradient-checkpointing"),
        ({"lora_rank": 64}, "--engine transformers --gradient-checkpointing"),
    ):
        config = GrpoConfig(param_dtype="bfloat16", **options)
        plan = plan_of(config, QWEN_7B, 23.6 * GIB)
        assert not plan.fits
        with pytest.raises(RlvrError, match="vLLM needs") as caught:
            check_memory(plan, config, QWEN_7B, engine="vllm", rows=2)
        assert caught.value.hint == f"It should fit with {hint}."


def test_without_the_sizes_vllm_takes_little_beside_the_trainer():
    assert plan_of(GrpoConfig(), None, 80 * GIB).utilization == 0.3
    assert plan_of(GrpoConfig(), None, 80 * GIB, 80 * GIB).utilization == 0.85
    assert plan_of(GrpoConfig(gpu_memory_utilization=0.5), None, 80 * GIB).utilization == 0.5
    assert memory_lines(
        plan_of(GrpoConfig(), None), place("cpu", engine="vllm", in_process=True, cuda_devices=[]), engine="vllm"
    ) == {"memory": "not known: the model's files are not on this machine, or do not say its sizes"}


def test_a_run_that_cannot_fit_is_refused_and_one_that_will_hardly_fit_is_noted():
    config, gpu = GrpoConfig(), 79.2 * GIB
    plan = plan_of(config, QWEN_7B, gpu, engine="transformers")
    with pytest.raises(RlvrError, match=r"take 115\.5 GiB, and the device has 79\.2 GiB") as caught:
        check_memory(plan, config, QWEN_7B, engine="transformers", rows=2)
    assert caught.value.hint == (
        "It should fit with --offload-optimizer --gradient-checkpointing (56.7 GiB on the host)."
    )
    large = plan_of(config, QWEN_7B, 110 * GIB, engine="transformers")
    with pytest.raises(RlvrError, match=r"take 115\.5 GiB, and the device has 110\.0 GiB") as caught:
        check_memory(large, config, QWEN_7B, engine="transformers", rows=2)
    assert caught.value.hint == "It should fit with --offload-optimizer (56.7 GiB on the host)."
    tight = plan_of(config, QWEN_15B, 34 * GIB, engine="transformers")
    note = check_memory(tight, config, QWEN_15B, engine="transformers", rows=2)
    assert note == (
        "updates are estimated to need more memory than the 34.0 GiB of their device. "
        "It should fit with --micro-batch-tokens auto."
    )
    assert check_memory(plan_of(config, QWEN_15B, gpu), config, QWEN_15B, engine="vllm", rows=2) == ""
    tiny = plan_of(config, QWEN_7B, 8 * GIB, engine="transformers")
    with pytest.raises(RlvrError) as caught:
        check_memory(tiny, config, QWEN_7B, engine="transformers", rows=2)
    assert caught.value.hint == "Use a larger GPU, or a smaller model."


@pytest.mark.parametrize(
    "config",
    [
        GrpoConfig(gradient_accumulation_steps=8),
        SftConfig(micro_batch_size=32),
        EiConfig(micro_batch_size=32),
        DpoConfig(micro_batch_size=16),
        EiConfig(micro_batch_tokens=40_960),
    ],
)
def test_micro_batches_that_fit_come_first(config):
    """Those of auto: the result is the same."""
    auto = "--micro-batch-tokens auto"
    rows = config.micro_batch_rows
    assert rows in (32, None)
    assert options_that_fit(config, QWEN_15B, one(40 * GIB), engine="transformers", rows=rows) == auto
    small = replace(config, micro_batch_tokens=None)
    assert options_that_fit(small, QWEN_15B, one(80 * GIB), engine="transformers", rows=2) == ""
    assert options_that_fit(small, QWEN_7B, one(8 * GIB), engine="transformers", rows=2) is None


def test_what_the_host_holds_is_not_on_the_device():
    config = GrpoConfig(param_dtype="bfloat16", offload_optimizer=True)
    plan = plan_of(config, QWEN_7B, 79.2 * GIB, engine="transformers")
    n = QWEN_7B["parameters"]
    assert plan.host == {"float32 weights": 4 * n, "optimizer state": 8 * n}
    assert "optimizer state" not in {*plan.updating, *plan.sampling}
    assert plan.updating["gradients"] == 4 * n + 2 * QWEN_7B["vocabulary"] * QWEN_7B["hidden"]
    assert plan_of(replace(config, param_dtype="float32"), QWEN_7B, GIB, engine="transformers").host == {
        "optimizer state": 8 * n
    }
    three = place(
        "auto", engine="transformers", in_process=True, cuda_devices=["cuda:0", "cuda:1", "cuda:2"], trainers=3
    )
    of_three = memory_plan(config, QWEN_7B, three, engine="transformers", rows=2, capacities={"cuda:0": 79.2 * GIB})
    assert of_three.host == {name: 3 * size for name, size in plan.host.items()}
    placement = place("auto", engine="transformers", in_process=True, cuda_devices=["cuda:0"])
    lines = memory_lines(plan, placement, engine="transformers")
    assert lines["on the host"] == "about 85.1 GiB: optimizer state 56.7 GiB, float32 weights 28.4 GiB"
    assert plan_of(GrpoConfig(), QWEN_7B, GIB, engine="transformers").host == {}
    beside = plan_of(GrpoConfig(offload_optimizer=True), QWEN_05B, 12 * GIB)
    assert not beside.moves_state, "there is nothing to move while vLLM samples"


DRY_RUNS = {
    "0.5B": {"24": "fits", "48": "fits", "80": "fits", "8 x 80": "with --trainers 8"},
    "1.5B": {
        "24": "with --offload-optimizer --micro-batch-tokens auto (11.5 GiB on the host)",
        "48": "fits",
        "80": "fits",
        "8 x 80": "with --trainers 8",
    },
    "3B": {
        "24": "with --param-dtype bfloat16 --offload-optimizer --gradient-checkpointing (34.5 GiB on the host)",
        "48": "with --offload-optimizer (23.0 GiB on the host)",
        "80": "fits",
        "8 x 80": "with --trainers 8",
    },
    "7B": {
        "24": "with --param-dtype bfloat16 --lora-rank 32 --gradient-checkpointing",
        "48": "with --param-dtype bfloat16 --offload-optimizer --gradient-checkpointing (85.1 GiB on the host)",
        "80": "with --offload-optimizer --gradient-checkpointing (56.7 GiB on the host)",
        "8 x 80": "with --trainers 8 --fsdp",
    },
}


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
@pytest.mark.parametrize("size", SIZES)
def test_the_dry_run_says_which_gpus_fit(size, engine):
    line = gpus_line(GrpoConfig(), shape_of_size(size), engine=engine, rows=2)
    expected = "; ".join(f"{name} GB: {said}" for name, said in DRY_RUNS[size].items())
    if (size, engine) == ("7B", "vllm"):  # 24 GB do not hold the weights twice
        expected = expected.replace("with", "with --engine transformers", 1)
    assert line == expected


def test_vllm_that_was_asked_for_is_exchanged_where_several_trainers_sample():
    line = gpus_line(GrpoConfig(engine="vllm"), QWEN_7B, engine="vllm", rows=2)
    assert line.endswith("8 x 80 GB: with --engine transformers --trainers 8 --fsdp")


def test_what_was_chosen_already_is_not_advised():
    for options, capacity, advised in (
        ({"param_dtype": "bfloat16"}, 47.4, "--offload-optimizer --gradient-checkpointing (85.1 GiB on the host)"),
        ({"param_dtype": "bfloat16", "optimizer": "adamw_kahan"}, 79.2, "--optimizer adamw --offload-optimizer (85.1 GiB on the host)"),
        ({"param_dtype": "bfloat16", "optimizer": "adamw_8bit"}, 79.2, "--gradient-checkpointing"),
        (
            {"param_dtype": "bfloat16", "optimizer": "adamw_8bit"}, 47.4,
            "--optimizer adamw --offload-optimizer --gradient-checkpointing (85.1 GiB on the host)",
        ),
        ({"offload_optimizer": True}, 79.2, "--gradient-checkpointing"),
        ({"param_dtype": "bfloat16", "offload_optimizer": True}, 47.4, "--gradient-checkpointing"),
        ({"compute_dtype": "float32"}, 79.2, "--offload-optimizer --micro-batch-tokens auto (56.7 GiB on the host)"),
    ):  # fmt: skip
        config = GrpoConfig(**options)
        assert options_that_fit(config, QWEN_7B, one(capacity * GIB), engine="transformers", rows=2) == advised, options


def test_a_host_with_too_little_memory_is_noted():
    config = GrpoConfig(param_dtype="bfloat16", offload_optimizer=True)
    plan = plan_of(config, QWEN_7B, 79.2 * GIB, engine="transformers")
    assert host_note(plan, 86 * GIB) == ""
    assert (
        host_note(plan, 64 * GIB)
        == "--offload-optimizer needs 85.1 GiB of the host's memory, and this one has 64.0 GiB"
    )
    assert host_note(plan_of(GrpoConfig(), QWEN_7B, GIB, engine="transformers"), 0) == ""


@pytest.mark.parametrize(
    ("trainers", "given", "state"),
    [
        (1, {}, 115.5),
        (2, {}, 231.0),
        (1, {"offload_optimizer": True}, 115.5),
        (1, {"offload_optimizer": True, "param_dtype": "bfloat16"}, 128.7),
    ],
)
def test_trainers_on_the_cpu_need_the_memory_of_this_machine(trainers, given, state):
    """By hand: 7.6 billion parameters of 16 bytes (18 with float32 weights beside those in bfloat16), and the head's gradient
    before it is added.
    """
    config = GrpoConfig(trainers=trainers, **given)
    placement = place("auto", engine="transformers", in_process=True, cuda_devices=[], trainers=trainers)
    plan = memory_plan(config, QWEN_7B, placement, engine="transformers", rows=2, capacities={})
    updating = sum(plan.updating.values()) * trainers + sum(plan.host.values())
    advice = f"{'Use fewer --trainers, or train' if trainers > 1 else 'Train'} on a GPU, or a smaller model."
    assert host_note(plan, updating) == ""
    assert host_note(plan, 1.01 * state * GIB) == (
        f"the run is estimated to need {updating / GIB:.1f} GiB, and this machine has {1.01 * state:.1f} GiB of memory. "
        f"{advice}"
    )
    with pytest.raises(
        RlvrError, match=f"optimizer state take {state:.1f} GiB, and this machine has 23.5 GiB"
    ) as caught:
        host_note(plan, 23.5 * GIB)
    assert caught.value.hint == f"{advice} --dry-run says which GPUs the run fits."
    assert "and this machine has 23.5 GiB of memory" in host_note(plan, 23.5 * GIB, dry_run=True), (
        "it is for another one"
    )


@pytest.mark.parametrize(("given", "copies"), [({"samplers": 4}, 4), ({"async_steps": 1}, 2)])
def test_what_samples_beside_trainers_on_the_cpu_exists_once(given, copies):
    alone, config = GrpoConfig(), GrpoConfig(trainers=2, **given)
    one_of_two, both = (
        memory_plan(
            config,
            QWEN_05B,
            place(
                "cpu", engine="transformers", in_process=not config.samples_apart, cuda_devices=[], trainers=trainers
            ),
            engine="transformers",
            rows=2,
            capacities={},
        )
        for config, trainers in ((alone, 1), (config, 2))
    )
    needed = 2 * one_of_two.needed + copies * 4 * QWEN_05B["parameters"]
    assert host_note(both, needed) == ""
    assert "is estimated to need" in host_note(both, 0.99 * needed)


@pytest.mark.parametrize(
    ("size", "layers", "rows", "given"),
    [
        ("7B", 1, 2, {"param_dtype": "bfloat16", "lora_rank": 32, "gradient_checkpointing": True}),
        pytest.param("0.5B", None, 4, {}, marks=pytest.mark.full),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("0.5B", 4, 2, {}),
                ("1.5B", 4, 2, {"gradient_checkpointing": True}),
                ("1.5B", 4, 8, {"param_dtype": "bfloat16", "optimizer": "adamw_8bit"}),
                ("7B", 2, 8, {"param_dtype": "bfloat16", "offload_optimizer": True, "gradient_checkpointing": True}),
                ("1.5B", 4, 2, {"micro_batch_tokens": 8192}),
                ("1.5B", 4, 2, {"lora_rank": 32}),
            )
        ),
    ],
)
def test_the_plan_of_an_update_is_near_the_peak_of_its_trace(size, layers, rows, given):
    found = traced(GrpoConfig(**given), size, rows=rows, layers=layers)
    assert found.ratio == pytest.approx(1, abs=0.15), found


@pytest.mark.slow
def test_a_trace_sees_what_the_plan_would_miss():
    """An optimizer of another size, and activations that the config says are not kept."""
    plain, kahan = (
        traced(GrpoConfig(param_dtype="bfloat16", optimizer=kind), "0.5B", rows=1, layers=1)
        for kind in ("adamw", "adamw_kahan")
    )
    assert kahan.peak - plain.peak == pytest.approx(2 * shape_of(qwen("0.5B", layers=1))["parameters"], rel=0.01)
    kept, again = (traced(GrpoConfig(gradient_checkpointing=on), "0.5B", rows=8, layers=3) for on in (False, True))
    saved = kept.planned["activations of a micro-batch"] - again.planned["activations of a micro-batch"]
    assert kept.peak - again.peak > 0.9 * saved


MEMORY_OPTIONS = [
    {"param_dtype": "float32"},
    {"optimizer": "adamw_8bit"},
    {"offload_optimizer": True},
    {"param_dtype": "bfloat16"},
    {"param_dtype": "bfloat16", "optimizer": "adamw_kahan"},
    {"param_dtype": "bfloat16", "optimizer": "adamw_8bit"},
    {"param_dtype": "bfloat16", "offload_optimizer": True},
    {"lora_rank": 32},
    {"param_dtype": "bfloat16", "lora_rank": 32},
    {"param_dtype": "bfloat16", "lora_rank": 256, "optimizer": "adamw_8bit"},
]


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("given", MEMORY_OPTIONS, ids=lambda given: "-".join(map(str, given.values())))
@pytest.mark.parametrize("size", SIZES)
def test_the_plan_of_each_choice_is_near_the_peak_of_its_trace(size, given, checkpointing):
    for rows in (2, 8):
        found = traced(GrpoConfig(**given, gradient_checkpointing=checkpointing), size, rows=rows)
        assert found.ratio == pytest.approx(1, abs=0.15), (rows, found)


def test_the_tokens_of_a_micro_batch_fill_the_device():
    """1.5B on 80 GB has 43 GiB for activations at 2.7 MiB a token; the estimate of what was chosen is within a tenth of the device."""
    config = GrpoConfig(micro_batch_tokens=0)
    plan = plan_of(config, QWEN_15B, 79.2 * GIB, engine="transformers")
    assert plan.micro_batch_tokens is not None
    assert plan.micro_batch_tokens % 1024 == 0
    assert 0.85 * 79.2 * GIB < sum(plan.updating.values()) <= 0.9 * 79.2 * GIB
    assert (
        plan_of(
            replace(config, gradient_checkpointing=True), QWEN_15B, 79.2 * GIB, engine="transformers"
        ).micro_batch_tokens
        == 65536
    )
    tight = plan_of(config, QWEN_15B, 31 * GIB, engine="transformers")
    assert tight.micro_batch_tokens == 1280, "one row at least"
    assert plan_of(config, QWEN_15B, engine="transformers").micro_batch_tokens == 2048, "on a CPU"
    assert plan_of(replace(config, sampling_max_tokens=4096), QWEN_15B).micro_batch_tokens == 256 + 4096
    assert plan_of(DpoConfig(), QWEN_15B, rows=None).micro_batch_tokens == 2 * 1280, "one pair at least"
    assert plan_of(config, None, 80 * GIB).micro_batch_tokens == 2048
    assert plan_of(replace(config, micro_batch_tokens=5000), QWEN_15B, 80 * GIB).micro_batch_tokens == 5000
    assert plan_of(GrpoConfig(), QWEN_15B, 80 * GIB).micro_batch_tokens is None, "rows were asked for"
    for unasked in (GrpoConfig(), EiConfig(), SftConfig(), PpoConfig()):
        assert unasked.micro_batch_rows is None
        assert plan_of(unasked, QWEN_15B, rows=None) == plan_of(replace(unasked, micro_batch_tokens=0), QWEN_15B)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (GrpoConfig(), "up to 2,048 tokens"),
        (GrpoConfig(micro_batch_tokens=0, gradient_accumulation_steps=8), "up to 2,048 tokens"),
        (
            GrpoConfig(gradient_accumulation_steps=256),
            "1 response of up to 1,280 tokens: about 1.6 times the passes that --micro-batch-tokens auto makes (2,048 tokens), for the "
            "same result",
        ),
        (
            SftConfig(micro_batch_size=16, sampling_max_tokens=256),
            "16 responses of up to 8,192 tokens: about 4 times the activations that --micro-batch-tokens auto keeps (2,048 tokens), for the "
            "same result",
        ),
        (
            DpoConfig(micro_batch_size=8, sampling_max_tokens=256),
            "16 responses of up to 8,192 tokens: about 4 times the activations that --micro-batch-tokens auto keeps (2,048 tokens), for the "
            "same result",
        ),
        (SftConfig(micro_batch_size=4, sampling_max_tokens=256), "4 responses"),
        (
            GrpoConfig(micro_batch_tokens=4096),
            "up to 4,096 tokens: about 2 times the activations that --micro-batch-tokens auto keeps (2,048 tokens), for the same result",
        ),
    ],
)
def test_the_plan_says_what_a_split_that_is_asked_for_costs(config, line):
    plan = plan_of(config, QWEN_15B, engine="transformers", rows=config.micro_batch_rows)
    assert micro_batches_line(config, plan) == line


@given(
    st.sampled_from([QWEN_05B, QWEN_15B, QWEN_7B]),
    st.floats(4, 200),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([0.0, 0.3, 0.85]),
)
def test_trainer_and_vllm_fit_a_shared_device_together(shape, capacity, dtype, utilization):
    config = GrpoConfig(param_dtype=dtype, gpu_memory_utilization=utilization)
    try:
        plan = plan_of(config, shape, capacity * GIB)
    except RlvrError:
        return
    if plan.shortage:
        assert utilization == 0, "what is asked for is given or refused"
        return
    assert sum(plan.sampling.values()) + plan.utilization * capacity * GIB <= capacity * GIB
    assert plan.utilization * capacity * GIB >= shape["parameters"] * 2 + WORKSPACE
    assert utilization in (0, plan.utilization)


@pytest.mark.parametrize(
    "size", [size if size == "7B" else pytest.param(size, marks=pytest.mark.slow) for size in SIZES]
)
@pytest.mark.parametrize(
    ("command", "given", "engine"),
    [
        ("grpo", [], "vllm"),
        ("grpo", [], "transformers"),
        ("grpo", ["--gradient-accumulation-steps", "8", "--kl-coef", "0.1"], "vllm"),
        slow("grpo", ["--micro-batch-tokens", "65536"], "transformers"),
        slow("grpo", ["--compute-dtype", "float32"], "transformers"),
        ("grpo", ["--async-steps", "1"], "vllm"),
        ("grpo", ["--trainers", "2"], "transformers"),
        ("ei", ["--trainers", "8", "--fsdp", "--ei-batch-size", "64"], "transformers"),
        slow("grpo", ["--trainers", "2", "--offload-optimizer"], "transformers"),
        ("sft", [], "transformers"),
        slow("sft", ["--micro-batch-size", "8"], "transformers"),
        slow("sft", ["--offload-optimizer"], "transformers"),
        slow("ei", ["--lora-rank", "64"], "vllm"),
        slow("ppo", [], "transformers"),
        ("ppo", ["--critic", "shared", "--kl-coef", "0.1"], "vllm"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "defaults",
)
def test_a_run_fits_with_what_its_dry_run_proposes(command, given, engine, size):
    shape = shape_of_size(size)

    def note(options, bytes):
        """What a command line gets to hear about its memory on GPUs of so many bytes."""
        config = read_options(command, [*given, *options])
        chosen = config.engine if "--engine" in options else "transformers" if "--trainers" in options else engine
        devices = {f"cuda:{number}": bytes for number in range(config.trainers + config.async_steps)}
        placement = place(
            "auto", engine=chosen, in_process=not config.async_steps, cuda_devices=[*devices], trainers=config.trainers
        )
        plan = memory_plan(config, shape, placement, engine=chosen, rows=config.micro_batch_rows, capacities=devices)
        try:
            return check_memory(plan, config, shape, engine=chosen, rows=config.micro_batch_rows)
        except RlvrError as error:
            return error.hint

    config = read_options(command, given)
    for said in gpus_line(config, shape, engine=engine, rows=config.micro_batch_rows).split("; "):
        gpu, _, proposed = said.partition(": ")
        name = int(gpu.split()[-2])
        bytes = GPUS[name]
        assert gpu != "8 x 80 GB" or "--trainers 8" in f"{proposed} {' '.join(given)}"
        if proposed == "fits":
            assert note([], bytes) == ""
        elif proposed == "too small":
            assert given == ["--compute-dtype", "float32"], "the others have a way"
            assert (size, name) == ("7B", 24)
            assert note([], bytes) == "Use a larger GPU, or a smaller model."
        else:
            assert "--trainers 8" in proposed or note([], bytes).endswith(f"It should fit {proposed}.")
            assert note(proposed.removeprefix("with ").partition(" (")[0].split(), bytes) == ""


def test_shards_hold_a_share_of_everything_but_activations():
    """By hand: 7B in float32 is 28.4 GiB, its moments 56.7 GiB; over 8 trainers 3.5 and 7.1 GiB each."""
    shape, devices = shape_of_size("7B"), {f"cuda:{number}": 79.2 * GIB for number in range(8)}
    placement = place("auto", engine="transformers", in_process=True, cuda_devices=[*devices], trainers=8)

    def plan(**options):
        config = GrpoConfig(trainers=8, **options)
        return memory_plan(config, shape, placement, engine="transformers", rows=2, capacities=devices)

    copies, shards = plan(kl_coef=0.1), plan(kl_coef=0.1, fsdp=True)
    for name in ("weights", "optimizer state", "reference model"):
        assert shards.updating[name] == copies.updating[name] / 8
    assert shards.updating["activations of a micro-batch"] == copies.updating["activations of a micro-batch"]
    assert (copies.fits, shards.fits) == (False, True)
    assert shards.sampling["weights put together"] == copies.updating["weights"]
    assert not shards.keeps_workspace
    assert shards.sampling["key-value cache"] == copies.sampling["key-value cache"]
    assert (
        host_note(shards, 50 * GIB)
        == "a checkpoint with --fsdp needs 56.7 GiB of the host's memory, and this one has 50.0 GiB"
    )
    offloaded = plan(fsdp=True, offload_optimizer=True)
    assert offloaded.host["optimizer state"] == 2 * shards.host["optimizer state of a checkpoint"]


def test_a_gpu_that_holds_the_shards_but_not_the_whole_weights_is_too_small():
    shape = shape_of_size("7B")
    config = GrpoConfig(
        trainers=8, fsdp=True, gradient_checkpointing=True, param_dtype="bfloat16", optimizer="adamw_kahan"
    )
    for capacity, fits in ((24 * GIB, True), (20 * GIB, False)):
        devices = {f"cuda:{number}": capacity for number in range(8)}
        placement = place("auto", engine="transformers", in_process=True, cuda_devices=[*devices], trainers=8)
        plan = memory_plan(config, shape, placement, engine="transformers", rows=1, capacities=devices)
        assert plan.fits is fits, (sum(plan.updating.values()) / GIB, sum(plan.sampling.values()) / GIB)


@pytest.mark.parametrize(
    ("size", "trainers", "rows", "layers", "checkpointing"),
    [
        pytest.param("7B", 8, 2, 4, "yes", marks=pytest.mark.full),
        pytest.param("7B", 4, 1, 3, "no", marks=pytest.mark.full),
        pytest.param("1.5B", 8, 2, 6, "no", marks=pytest.mark.slow),
        pytest.param("0.5B", 2, 2, 4, "yes", marks=pytest.mark.slow),
    ],
)
def test_the_plan_of_shards_is_near_the_peak_of_its_trace(size, trainers, rows, layers, checkpointing):
    """Traced in a process of its own, because PyTorch has one process group."""
    helper = Path(__file__).parents[2] / "helpers/devices/traced_shards.py"
    arguments = map(str, (size, trainers, rows, layers, checkpointing))
    done = subprocess.run([sys.executable, "-W", "ignore", str(helper), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sum(found["planned"].values()) / found["peak"] == pytest.approx(1, abs=0.15), found
