"""The memory of an update: the plan's lines, and the peak of a trace of the same update on an emulated CUDA device."""

from typing import NamedTuple

import torch

from fake_cuda import fake_cuda, freeing_as_it_goes
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.models.adapter import AdaptedPolicy, add_adapter
from rlvr_cli.models.compute.bitsandbytes import import_bitsandbytes
from rlvr_cli.models.policy import as_policy, trained_adapter
from rlvr_cli.models.tokens.tokenization import collate
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.optimizers.optimizer_state import layout
from rlvr_cli.training.parallel.placement import place
from rlvr_cli.training.planning.memory import GUESSED_PROMPT, memory_plan
from rlvr_cli.training.updates.update import train_update
from shapes import qwen, shape_of

DEVICE = "cuda:0"
ELSEWHERE = ("CUDA", "what the sampler keeps")  # lines of the plan that are no tensors of an update


class Traced(NamedTuple):
    """Bytes on the device during an update."""

    planned: dict[str, float]
    peak: int

    @property
    def ratio(self) -> float:
        """The plan's sum over the trace's peak."""
        return sum(self.planned.values()) / self.peak


class Before(Exception):
    """Raised before the step of an optimizer on the host: real memory there would be filled with numbers of nothing."""


def traced(config: GrpoConfig, size: str, *, rows: int, layers: int | None = None, capacity: float = 2**60) -> Traced:
    """Trace an update of Qwen2.5 on two micro-batches of so many rows, all of the longest, after a first update.

    All that the package does on the device is done, but for floating-point numbers, which are not computed.
    `rows` count if the config counts no tokens.
    """
    if config.optimizer == "adamw_8bit":
        import_bitsandbytes()
    model = qwen(size, layers=layers, dtype=getattr(torch, config.param_dtype))
    placement = place("auto", engine="transformers", in_process=True, cuda_devices=[DEVICE])
    plan = memory_plan(
        config, shape_of(model), placement, engine="transformers", rows=rows, capacities={DEVICE: capacity}
    )
    if plan.micro_batch_tokens:
        rows = plan.micro_batch_tokens // (GUESSED_PROMPT + config.sampling_max_tokens)
    generator = torch.Generator().manual_seed(0)
    prompts, responses = (
        torch.randint(1, 150_000, (2 * rows, length), generator=generator).tolist()
        for length in (GUESSED_PROMPT, config.sampling_max_tokens)
    )
    batch = collate(prompts, responses, pad_id=0)
    policy = as_policy(model)
    if lora := trained_adapter(config):
        add_adapter(model, lora)
        policy = AdaptedPolicy(model, base="")
    with fake_cuda(compute=False) as cuda:
        model.to(DEVICE)
        optimizer = make_optimizer(policy, learning_rate=0.1, kind=config.optimizer, offload=config.offload_optimizer)
        if config.offload_optimizer:
            optimizer.register_step_pre_hook(_stop)
        else:
            for parameter in policy.trainable_parameters().values():
                optimizer.state[parameter] = {k: slot.zeros() for k, slot in layout(optimizer, parameter).items()}
        cuda.forget()
        try:
            with freeing_as_it_goes():
                train_update(
                    policy,
                    optimizer,
                    batch,
                    learning_rate=0.1,
                    micro_batch_size=rows,
                    micro_batch_tokens=plan.micro_batch_tokens,
                    gradient_checkpointing=config.gradient_checkpointing,
                )
        except Before:
            assert config.offload_optimizer
        planned = {name: size for name, size in plan.updating.items() if name not in ELSEWHERE}
        return Traced(planned, cuda.peak)


def _stop(*_: object) -> None:
    raise Before
