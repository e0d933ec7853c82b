"""The device memory that a training run will need, estimated from the model's config alone, and what to do with little.

Enters: the options, the sizes of the model, where trainer and engine compute, and how much memory these devices have.
Leaves: a `MemoryPlan`, as numbers and as lines of the plan; or an RlvrError if the run cannot fit.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch

from rlvr_cli.config.parsing.options import flag
from rlvr_cli.config.shared.optimization import OptimizerKind
from rlvr_cli.config.shared.training import TrainingConfig
from rlvr_cli.data.datasets import evaluation_spec
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.compute.device import resolve_compute_dtype
from rlvr_cli.models.identity import model_path, model_shape
from rlvr_cli.samplers.open import UTILIZATION, engine_kind
from rlvr_cli.training.parallel.placement import Placement, place

# The most logits held at once on a GPU (models/log_probs.py): three chunks, and those kept.
HEAD_LOGITS = 3 * 2**26 + 5 * 2**24
# Bytes that a layer keeps of each number of a token's hidden state, by the bytes of a weight and of an operand: norms work in
# float32, and operands are rounded copies. `benchmarks/memory.py` compares the plan with traces.
HIDDEN = {(4, 4): 40, (4, 2): 32, (2, 2): 22}
GUESSED_PROMPT = 256  # tokens
GUESSED_UTILIZATION = 0.3  # where vLLM shares the trainer's device and the model's sizes are not known
CONTEXT = 1.5 * 2**30  # bytes of a GPU that no tensor has: CUDA's context and kernels, a sleeping vLLM's graphs
ROOM = 0.9  # of a device that --micro-batch-tokens auto fills: the rest is for fragments, and for the estimate's error
# Of a micro-batch with auto: on a CPU, where more are no faster, and where memory or model are not known; and else at most.
TOKENS, MOST_TOKENS = 2048, 65536
BESIDE = 8192  # the fewest for which the embedded engine keeps what it samples with
WORKSPACE = 2**30  # bytes that vLLM needs beside weights and cache
_COPIES, _CACHE = "bfloat16 copy of the weights", "key-value cache"
_WHOLE = "weights put together"  # of shards
_KEPT = (_COPIES, _CACHE)  # of the embedded engine
NODE = 8  # GPUs of a machine
GPUS = {24: 23.6 * 2**30, 48: 47.4 * 2**30, 80: 79.2 * 2**30}  # GB by name -> the bytes that torch finds on one


@dataclass(frozen=True)
class MemoryPlan:
    """What the trainer's device will hold, in bytes by purpose, and what follows for vLLM.

    Attributes:
        updating: during an update; empty if the sizes of the model are not known.
        sampling: while the engine samples, without vLLM's share; empty also if nothing is sampled.
        host: what the host's memory holds beside its trainers: of optimizers, and, if trainers are on its CPU, the engine's processes.
        capacity: the bytes of the trainer's device; None on a CPU.
        on_host: how many trainers compute on this machine's CPU, in the memory of the host.
        devices: the bytes of each visible CUDA device, by its name.
        shortage: why vLLM has too little memory, as a sentence; empty if it has enough.
        utilization: the share of its device that vLLM takes.
        moves_state: whether the optimizer's state leaves the device while vLLM samples there.
        micro_batch_tokens: the tokens of a micro-batch; None if rows are counted.
        tokens_that_fit: those that --micro-batch-tokens auto gives one.
        largest: the tokens of the largest micro-batch that is expected.
        keeps_workspace: whether the embedded engine keeps its cache, its copies of weights and its graphs during updates.
    """

    updating: Mapping[str, float]
    sampling: Mapping[str, float]
    host: Mapping[str, float] = field(default_factory=dict)
    capacity: float | None = None
    on_host: int = 0
    devices: Mapping[str, float] = field(default_factory=dict)
    shortage: str = ""
    utilization: float = UTILIZATION
    moves_state: bool = False
    micro_batch_tokens: int | None = None
    tokens_that_fit: int = TOKENS
    largest: int = 0
    keeps_workspace: bool = False

    @property
    def fits(self) -> bool:
        """Whether the estimate for an update is within the capacity, and vLLM has enough."""
        if self.shortage or self.capacity is None:
            return not self.shortage
        return self.needed <= self.capacity

    @property
    def needed(self) -> float:
        """The bytes that a trainer's device holds at most. Of the key-value cache none: the engine makes do with a smaller one."""
        sampling = sum(self.sampling.values()) - self.sampling.get(_CACHE, 0.0)
        return max(sum(self.updating.values()), sampling)

    @property
    def state(self) -> float:
        """The bytes of weights, gradients and optimizer state, which no choice of micro-batches changes."""
        kept = ("weights", "adapter", "critic", "gradients", "optimizer state")
        return sum(self.updating.get(name, 0.0) for name in kept)


def memory_plan(
    config: TrainingConfig,
    shape: Mapping[str, int] | None,
    placement: Placement,
    *,
    engine: str,
    rows: int | None,
    capacities: Mapping[str, float],
) -> MemoryPlan:
    """Estimate the memory that a run needs, and divide a device that trainer and vLLM share.

    Args:
        shape: the sizes of `identity.model_shape`; None if they are not known.
        engine: the name of the sampling engine.
        rows: responses in a micro-batch, or packed sequences, that are asked for; None: its tokens are counted.
        capacities: the bytes of each visible CUDA device, by its name.

    Raises:
        RlvrError: --gpu-memory-utilization is more than the trainer leaves of vLLM's device, or less than vLLM needs.
    """
    capacity, of = capacities.get(placement.trainer), capacities.get(placement.engine)
    apart = engine_kind(engine).share is None  # it has memory of its own
    asked, tokens = config.gpu_memory_utilization, config.micro_batch_tokens
    if tokens is None and (rows is None or config.packed_length):
        tokens = (rows or 0) * config.packed_length  # 0: as many as fit
    if not shape:
        guess = GUESSED_UTILIZATION if apart and placement.shared else UTILIZATION
        return MemoryPlan(
            {},
            {},
            capacity=capacity,
            devices=capacities,
            utilization=asked or guess,
            micro_batch_tokens=TOKENS if tokens == 0 else tokens,
        )
    row = _row_tokens(config)
    unit = row * config.rows_of_unit
    that_fit = _tokens_that_fit(config, shape, placement, capacity, engine=engine, unit=unit)
    tokens = that_fit if tokens == 0 else tokens
    largest = (rows or 0) * row if tokens is None else max(tokens, unit)
    updating, sampling = _held_by_trainer(config, shape, placement, engine=engine, tokens=largest)
    plan = MemoryPlan(
        updating,
        sampling,
        _held_by_host(config, shape, placement),
        capacity=capacity,
        on_host=placement.trainers.count("cpu"),
        devices=capacities,
        utilization=asked or UTILIZATION,
        micro_batch_tokens=tokens,
        tokens_that_fit=that_fit,
        largest=largest,
    )
    if not apart and not config.fsdp:
        return _keeping(plan)
    if config.fsdp or of is None:  # of shards, what an engine samples with is taken apart again
        return plan
    return _divided(plan, config, shape, of=of, shared=placement.shared)


def _keeping(plan: MemoryPlan) -> MemoryPlan:
    """Let the embedded engine keep during updates what it samples with, if there is room: it then need not be made again."""
    kept = sum(plan.sampling.get(name, 0.0) for name in _KEPT)
    if not plan.sampling or plan.capacity is None or sum(plan.updating.values()) + kept > ROOM * plan.capacity:
        return plan
    return replace(plan, updating={**plan.updating, "what the sampler keeps": kept}, keeps_workspace=True)


def _tokens_that_fit(
    config: TrainingConfig,
    shape: Mapping[str, int],
    placement: Placement,
    capacity: float | None,
    *,
    engine: str,
    unit: int,
) -> int:
    """Return how many tokens a micro-batch may have, at least those of a unit: a multiple of 1,024 that fits ROOM of the device."""
    if capacity is None:
        return max(TOKENS, unit)
    updating, sampling = _held_by_trainer(config, shape, placement, engine=engine, tokens=MOST_TOKENS)
    per_token = updating["activations of a micro-batch"] / MOST_TOKENS

    def fit(kept: float) -> int:
        found = MOST_TOKENS - (sum(updating.values()) + kept - ROOM * capacity) / per_token
        return max(min(int(found) // 1024 * 1024, MOST_TOKENS), unit)

    beside = fit(sum(sampling.get(name, 0.0) for name in _KEPT))
    return beside if beside >= BESIDE else fit(0)


def compute_dtype(config: TrainingConfig, device: str) -> torch.dtype:
    """Return the precision of matrix products on a device, which need not be on this machine."""
    weights = getattr(torch, config.param_dtype)
    return resolve_compute_dtype(config.compute_dtype, weights=weights, device=torch.device(device))


def adapter_parameters(shape: Mapping[str, int], rank: int) -> int:
    """Return the parameters of a LoRA adapter of all linear layers but the head: a Llama's, as `model_shape` describes it.

    Of a mixture of experts, those of an attention like a Llama's: about as many as there are.
    """
    hidden, intermediate, kv = shape["hidden"], shape["intermediate"], shape["kv_width"]
    query = shape.get("query_width", hidden)
    attention = 2 * (hidden + query) + 2 * (hidden + kv)  # in and out of query and output, of key and value
    mlp = shape.get("dense_layers", shape["layers"]) * _mlp_matrices(shape) * (hidden + intermediate)
    return rank * (shape["layers"] * attention + mlp)


def _mlp_matrices(shape: Mapping[str, int]) -> int:
    return 2 + shape.get("gates", 1)


def _row_tokens(config: TrainingConfig) -> int:
    """Tokens of a long row: a prompt and the longest response."""
    return GUESSED_PROMPT + config.longest_response(config.sampling_max_tokens)


def _held_by_trainer(
    config: TrainingConfig, shape: Mapping[str, int], placement: Placement, *, engine: str, tokens: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return what its device holds during an update on micro-batches of so many tokens, and while the engine samples."""
    on_gpu, n = placement.trainer.startswith("cuda"), float(shape["parameters"])
    width = 4 if config.param_dtype == "float32" else 2
    compute = compute_dtype(config, placement.trainer).itemsize
    # bytes that a layer keeps of a token; what an adapter keeps is between its two matrices
    layer = HIDDEN[width, compute] * shape["hidden"] + (4 * shape["intermediate"] + 7 * config.lora_rank) * compute
    logits = 4.0 * min(HEAD_LOGITS, tokens * shape["vocabulary"])
    activations = float(tokens * shape["layers"] * layer)
    if config.gradient_checkpointing:  # a layer at a time is computed again, when the logits are no longer needed
        inputs = tokens * shape["layers"] * shape["hidden"] * width
        gradients = 3 * shape["intermediate"] * compute  # at once, of what the layer's MLP keeps
        activations = inputs + max(tokens * (layer + gradients) - logits, 0.0)
    share = 1 / config.trainers if config.fsdp else 1.0
    held = {"weights": n * width * share}
    trained, trained_width = n * share, width
    if config.lora_rank:
        trained, trained_width = float(adapter_parameters(shape, config.lora_rank)), 4
        held["adapter"] = 4 * trained
    if (networks := _networks(config)) == 2:
        held["critic"] = sum(held.values())
        trained, activations = 2 * trained, 2 * activations
    if not config.offload_optimizer:
        held["optimizer state"] = trained * _state_bytes(config.optimizer, trained_width)
    if config.keeps_reference and not config.lora_rank:  # an adapted policy is its own reference
        held["reference model"] = n * width * share
    if config.loaded_teacher:  # whole on every device
        held["teacher"] = _parameters_of(config.loaded_teacher) * (width + (compute if compute < width else 0))
    if on_gpu:
        held["CUDA"] = CONTEXT
    if placement.trainer != "cpu":
        held |= _held_by_samplers(config, shape, placement)
    copies = {_COPIES: n * compute} if compute < width else {}  # of the policy, from which the engine samples
    all_copies = {name: bytes * networks for name, bytes in copies.items()}
    updating = held | ({_WHOLE: _put_together(shape, width, compute)} if config.fsdp else all_copies) | {
        # sums in float32, and the head's before it is added
        "gradients": 4 * trained
        + (0 if config.lora_rank or config.fsdp else shape["vocabulary"] * shape["hidden"] * width),
        "activations of a micro-batch": activations,
        "logits": logits,
    }  # fmt: skip
    if not (config.trains_on_samples or config.eval_dataset or evaluation_spec(config.dataset)):
        return updating, {}
    if config.fsdp:
        held[_WHOLE] = n * width
    if engine_kind(engine).share is None or config.samples_apart:
        return updating, held
    sequences = min(math.ceil(config.rollout_batch_size / config.trainers), config.max_batch_size or 256)
    cached = sequences * _row_tokens(config) * _cached_bytes(shape, compute)
    return updating, held | copies | {_CACHE: cached}


def _held_by_samplers(config: TrainingConfig, shape: Mapping[str, int], placement: Placement) -> dict[str, float]:
    """Return what the engine's own processes hold in the memory of the first trainer's device, for all trainers."""
    weights = float(shape["parameters"] * (4 if config.param_dtype == "float32" else 2))
    if not config.samples_apart or placement.trainer != placement.engine:
        return {}
    if config.samplers > 1:
        return {"the samplers' weights": config.samplers * weights}
    copies = 1 if config.lora_rank else 2  # of an adapter, the snapshot is small
    return {"the sampling process's weights, and the snapshot it samples from": copies * weights}


def _networks(config: TrainingConfig) -> int:
    """Return how many models are trained: the policy's, and the critic's own."""
    return 2 if config.critic == "own" else 1


@functools.cache  # its files are read to be counted
def _parameters_of(model: str) -> float:
    """Return the parameters of a model; 0 if they are not known."""
    return float((model_shape(model_path(model)) or {"parameters": 0})["parameters"])


def _put_together(shape: Mapping[str, int], width: int, compute: int) -> float:
    """Bytes of the weights that shards are put together to, and of their gradients before these are divided.

    At any time they are those of two layers in the precision of products, a layer's gradients in float32, and weights and gradients
    of what is in no layer: embedding and head.
    """
    hidden, query = shape["hidden"], shape.get("query_width", shape["hidden"])
    layer = float(2 * hidden * (query + shape["kv_width"]) + _mlp_matrices(shape) * hidden * shape["intermediate"])
    others = shape["parameters"] - shape["layers"] * layer
    return layer * (2 * compute + 4) + others * 2 * width


def _state_bytes(optimizer: OptimizerKind, width: int) -> float:
    """Bytes of the optimizer's state for a parameter of `width` bytes."""
    match optimizer:
        case "adamw":
            return 2 * width
        case "adamw_kahan":
            return 3 * width
        case "adamw_8bit":  # with two scales for 256 parameters, and a compensation
            return 2 + 2 * 4 / 256 + (2 if width == 2 else 0)


def _held_by_host(config: TrainingConfig, shape: Mapping[str, int], placement: Placement) -> dict[str, float]:
    """Return what the host's memory holds beside its trainers: of optimizers, and, if trainers are on its CPU, the engine's processes."""
    held = _held_by_samplers(config, shape, placement) if placement.trainer == "cpu" else {}
    return held | _held_by_optimizers(config, shape, trainers=len(placement.trainers))


def _held_by_optimizers(config: TrainingConfig, shape: Mapping[str, int], *, trainers: int) -> dict[str, float]:
    """Return what the optimizers of so many trainers hold in the memory of this machine's host."""
    if config.fsdp and not config.offload_optimizer:
        width = 4 if config.param_dtype == "float32" else 2
        return {"optimizer state of a checkpoint": shape["parameters"] * _state_bytes(config.optimizer, width)}
    if not config.offload_optimizer:
        return {}
    if config.lora_rank:
        return {"optimizer state": 8.0 * trainers * _networks(config) * adapter_parameters(shape, config.lora_rank)}
    n = float(shape["parameters"] * _networks(config)) * (
        trainers / config.trainers + 1 if config.fsdp else trainers
    )  # and whole, to save it
    return ({"float32 weights": 4 * n} if config.param_dtype == "bfloat16" else {}) | {"optimizer state": 8 * n}


def _divided(
    plan: MemoryPlan, config: TrainingConfig, shape: Mapping[str, int], *, of: float, shared: bool
) -> MemoryPlan:
    """Settle vLLM's share of its device of so many bytes. If the trainer is there too, vLLM gets what it leaves.

    The optimizer's state stays on the device if there is room for it beside vLLM with a cache for a whole batch.
    """
    width = 4 if config.dtype == "float32" else 2
    response = _row_tokens(config) * _cached_bytes(shape, width)
    least = shape["parameters"] * width + WORKSPACE + response
    wanted = config.gpu_memory_utilization or None
    enough = least + (min(config.rollout_batch_size, 256) - 1) * response if wanted is None else wanted * of
    room = of - sum(plan.sampling.values()) if shared else of
    if shared and room < enough and "optimizer state" in plan.sampling:
        held = {name: bytes for name, bytes in plan.sampling.items() if name != "optimizer state"}
        plan, room = replace(plan, sampling=held, moves_state=True), of - sum(held.values())
    most = max(math.floor(100 * room / of), 0) / 100
    if wanted is not None and wanted > most:
        raise RlvrError(
            f"--gpu-memory-utilization {wanted:g} is more than the trainer leaves: {most:g} of {_size(of)}.",
            "Use --gpu-memory-utilization auto: vLLM then takes what there is.",
        )
    utilization = min(UTILIZATION, most) if wanted is None else wanted
    if utilization * of >= least:
        return replace(plan, utilization=utilization)
    shortage = f"vLLM needs {_size(least)} for its weights and one response, and gets {_size(utilization * of)} of {_size(of)}."
    if wanted is not None:
        raise RlvrError(shortage, "Use --gpu-memory-utilization auto: vLLM then takes what there is.")
    return replace(plan, utilization=utilization, shortage=shortage)


def _cached_bytes(shape: Mapping[str, int], width: int) -> float:
    """Bytes of a token's keys and values."""
    return float(shape["layers"] * 2 * shape["kv_width"] * width)


def options_that_fit(
    config: TrainingConfig, shape: Mapping[str, int], devices: Mapping[str, float], *, engine: str, rows: int | None
) -> str | None:
    """Return the options with which a run fits CUDA devices of so many bytes: those that change its result least.

    Returns:
        The options, as they are written after the command, and what the host then holds; empty if it fits without any, None if it
        cannot.
    """
    for options, smaller, fewer, of in _smaller(config, engine=engine, rows=rows):
        try:
            placement = place(
                config.device,
                engine=of,
                in_process=not config.samples_apart,
                cuda_devices=[*devices],
                trainers=config.trainers,
                samplers=config.samplers,
            )
            plan = memory_plan(smaller, shape, placement, engine=of, rows=fewer, capacities=devices)
        except RlvrError:
            continue
        if plan.fits:
            host = f" ({_size(sum(plan.host.values()))} on the host)" if "--offload-optimizer" in options else ""
            return " ".join(options) + host
    return None


# What makes weights and optimizer state take less of the device, that which changes the result least first.
_STATES: tuple[dict[str, Any], ...] = (
    {"fsdp": True},
    {"fsdp": True, "offload_optimizer": True},
    {"optimizer": "adamw", "offload_optimizer": True},  # an update waits for the host, and gives the same result
    {"fsdp": True, "param_dtype": "bfloat16", "optimizer": "adamw_kahan", "offload_optimizer": False},
    {"param_dtype": "bfloat16", "optimizer": "adamw_kahan", "offload_optimizer": False},
    {"param_dtype": "bfloat16", "optimizer": "adamw_8bit", "offload_optimizer": False},
    {"param_dtype": "bfloat16", "optimizer": "adamw", "offload_optimizer": True},
    {"optimizer": "adamw", "lora_rank": 32},
    {"param_dtype": "bfloat16", "optimizer": "adamw", "lora_rank": 32},
)
_ADAPTED_STATES: tuple[dict[str, Any], ...] = ({"param_dtype": "bfloat16"},)  # the state of an adapter is small


def _smaller(
    config: TrainingConfig, *, engine: str, rows: int | None
) -> Iterator[tuple[list[str], TrainingConfig, int | None, str]]:
    """Yield options that save memory, first none and those that change the result least, with what they lead to.

    Smaller micro-batches and gradient checkpointing change nothing. The embedded engine, which shares the trainer's weights, is
    slower than vLLM in the same process.

    Yields:
        The options, and the config, rows of a micro-batch and engine that they give.
    """
    states: list[tuple[list[str], TrainingConfig]] = [([], config)]
    smaller_states = _ADAPTED_STATES if config.lora_rank else _STATES
    if config.critic == "own":  # only then another method: a head on the policy's model
        smaller_states += tuple({"critic": "shared"} | changes for changes in ({}, *smaller_states))
    for changes in smaller_states:
        try:
            smaller = replace(config, **changes)
        except RlvrError:  # not with the other options of this run
            continue
        if _networks(smaller) * _bytes_of(smaller) < _networks(config) * _bytes_of(config):
            states.append((_flags(config, changes), smaller))
    engines: list[tuple[list[str], str]] = [([], engine)]
    if engine_kind(engine).share is None and not engine_kind(engine).elsewhere:
        engines.append((["--engine transformers"], "transformers"))
    splits: list[tuple[list[str], int | None, int | None]] = [([], rows, config.micro_batch_tokens)]
    if rows or config.micro_batch_tokens:
        splits.append((["--micro-batch-tokens auto"], None, 0))
    choices = product(engines, states, (False, True), splits)
    for (kind, of), (options, state), recompute, (cut, fewer, tokens) in choices:
        if recompute and config.gradient_checkpointing:
            continue
        smaller = replace(
            state, micro_batch_tokens=tokens, gradient_checkpointing=state.gradient_checkpointing or recompute
        )
        yield kind + options + ["--gradient-checkpointing"] * recompute + cut, smaller, fewer, of


def _flags(config: TrainingConfig, changes: Mapping[str, Any]) -> list[str]:
    """Return changes of options as they are written after a command."""
    new = {name: value for name, value in changes.items() if value != getattr(config, name)}
    given = {True: flag, False: lambda name: flag(name).replace("--", "--no-", 1)}
    return [given[value](name) if isinstance(value, bool) else f"{flag(name)} {value}" for name, value in new.items()]


def _bytes_of(config: TrainingConfig) -> float:
    """Bytes of a weight on the device, of its bfloat16 copy, its gradient, and the optimizer's state."""
    width = 4 if config.param_dtype == "float32" else 2
    return (
        width
        + (2 if width == 4 else 0)
        + (0 if config.lora_rank else 4)
        + (0 if config.offload_optimizer or config.lora_rank else _state_bytes(config.optimizer, width))
    ) / (config.trainers if config.fsdp else 1)


def check_memory(
    plan: MemoryPlan, config: TrainingConfig, shape: Mapping[str, int] | None, *, engine: str, rows: int | None
) -> str:
    """Return a note if the run will probably not fit; else, the empty string.

    Raises:
        RlvrError: the run cannot fit: weights, gradients and optimizer state alone exceed the memory of their device, or vLLM
            has too little.
    """
    if plan.fits or not shape:
        return ""
    options = options_that_fit(config, shape, plan.devices, engine=engine, rows=rows)
    advice = f"It should fit with {options}." if options else "Use a larger GPU, or a smaller model."
    if plan.shortage:
        raise RlvrError(plan.shortage, advice)
    assert plan.capacity is not None
    if plan.state > plan.capacity:
        raise RlvrError(
            f"Weights, gradients and optimizer state take {_size(plan.state)}, and the device has {_size(plan.capacity)}.",
            advice,
        )
    return f"updates are estimated to need more memory than the {_size(plan.capacity)} of their device. {advice}"


def host_note(plan: MemoryPlan, memory: float, *, dry_run: bool = False) -> str:
    """Return a note if the host, with so many bytes of memory, holds too little for the optimizer, or for trainers on its CPU; else, the
    empty string.

    Raises:
        RlvrError: the run cannot fit, as of `check_memory`, on its CPU; with `dry_run` that is noted, too: the run may be for another machine.
    """
    needed = sum(plan.host.values()) + plan.needed * plan.on_host
    if needed <= memory:
        return ""
    if plan.on_host:
        fewer = "Use fewer --trainers, or train" if plan.on_host > 1 else "Train"
        advice, has = f"{fewer} on a GPU, or a smaller model.", f"this machine has {_size(memory)} of memory"
        state = plan.state * plan.on_host + sum(plan.host.get(of, 0) for of in ("optimizer state", "float32 weights"))
        if state > memory and not dry_run:
            raise RlvrError(
                f"Weights, gradients and optimizer state take {_size(state)}, and {has}.",
                f"{advice} --dry-run says which GPUs the run fits.",
            )
        return f"the run is estimated to need {_size(needed)}, and {has}. {advice}"
    what = "--offload-optimizer" if "optimizer state" in plan.host else "a checkpoint with --fsdp"
    return f"{what} needs {_size(needed)} of the host's memory, and this one has {_size(memory)}"


def memory_lines(plan: MemoryPlan, placement: Placement, *, engine: str) -> dict[str, str]:
    """Return the plan's lines about memory."""
    if not plan.updating:
        return {"memory": "not known: the model's files are not on this machine, or do not say its sizes"}
    of = "" if plan.capacity is None else f" of the {_size(plan.capacity)} of {placement.trainer}"
    lines = {"memory": f"about {_total(plan.updating, of)}"}
    if plan.host:
        lines["on the host"] = f"about {_total(plan.host)}"
    if not plan.sampling:
        return lines
    sampling = f"about {_total(plan.sampling)}"
    if plan.moves_state:
        sampling += ", the optimizer state on the host"
    if engine_kind(engine).share is None and placement.engine.startswith("cuda"):
        sampling += f"; {engine_kind(engine).title} takes {plan.utilization:.0%} of {placement.engine}"
    return lines | {"when sampling": sampling}


def gpus_line(config: TrainingConfig, shape: Mapping[str, int], *, engine: str, rows: int | None) -> str:
    """Say which GPUs the run fits, and what makes it fit the others."""
    kind, trainers = engine_kind(engine), config.trainers
    apart = config.async_steps and (trainers > 1 or (kind.share is None and not kind.elsewhere))
    count = trainers + (config.samplers if config.samplers > 1 else bool(apart))
    found = {
        f"{f'{count} x ' if count > 1 else ''}{name} GB": _options_on(
            config, shape, count, bytes, engine=engine, rows=rows
        )
        for name, bytes in GPUS.items()
    }
    if config.trainers == 1 and not config.samples_apart:
        embedded, words = config, [f"--trainers {NODE}"]
        if config.engine == "vllm":  # which in the trainer's process samples for one
            embedded, words = replace(config, engine="transformers"), ["--engine transformers", *words]
        divided = _options_on(replace(embedded, trainers=NODE), shape, NODE, GPUS[80], engine="transformers", rows=rows)
        found[f"{NODE} x 80 GB"] = None if divided is None else " ".join([*words, divided]).rstrip()
    return "; ".join(
        f"{gpus}: {'too small' if options is None else f'with {options}' if options else 'fits'}"
        for gpus, options in found.items()
    )


def _options_on(
    config: TrainingConfig, shape: Mapping[str, int], count: int, bytes: float, *, engine: str, rows: int | None
) -> str | None:
    """`options_that_fit` on so many GPUs of one kind."""
    devices = {f"cuda:{number}": bytes for number in range(count)}
    return options_that_fit(replace(config, device="auto"), shape, devices, engine=engine, rows=rows)


def _total(sizes: Mapping[str, float], of: str = "") -> str:
    largest_first = sorted(sizes.items(), key=lambda item: -item[1])
    return f"{_size(sum(sizes.values()))}{of}: " + ", ".join(f"{name} {_size(bytes)}" for name, bytes in largest_first)


def _size(bytes: float) -> str:
    for unit, name, digits in ((2**30, "GiB", 1), (2**20, "MiB", 0)):
        if bytes >= unit:
            return f"{bytes / unit:.{digits}f} {name}"
    return f"{bytes / 2**10:.0f} KiB"
