"""How the weights are updated: AdamW, its learning rate, an adapter, micro-batches, precision."""

from dataclasses import dataclass
from typing import Literal

from rlvr_cli.config.parsing.options import Provenance, flag, knob
from rlvr_cli.errors import RlvrError

ParamDtype = Literal["float32", "bfloat16"]
OptimizerKind = Literal["adamw", "adamw_kahan", "adamw_8bit"]
FusedKernels = Literal["auto", "none", "liger"]
ComputeDtype = Literal["auto", "float32", "bfloat16"]
Schedule = Literal["constant", "cosine"]
LengthNormalization = Literal["token_mean", "masked_mean", "masked_normalize"]

HIGHEST_ROUNDED_BETA2 = 0.96  # with moments in bfloat16; at it, their rounding changes a step by at most 5 %


@dataclass(frozen=True)
class OptimizationOptions(Provenance):
    learning_rate: float = knob(1e-5, "Peak learning rate of AdamW.", group="Optimization", common=True, above=0)
    optimizer: OptimizerKind = knob(
        "adamw",
        "adamw; adamw_kahan: with --param-dtype bfloat16, keeps what rounding takes from the weights and adds it later; "
        "adamw_8bit: moments of 8 bits (needs bitsandbytes), and with bfloat16 weights keeps the same.",
        group="Optimization",
    )
    offload_optimizer: bool = knob(
        False,
        "With --optimizer adamw: compute its steps on the host, from float32 weights and moments in the host's memory. "
        "The device then holds weights and gradients only.",
        group="Optimization",
    )
    warmup_steps: int = knob(0, "Updates of linear warm-up.", group="Optimization", at_least=0)
    lr_schedule: Schedule = knob(
        "constant", "After warm-up: constant, or cosine decay to a tenth of the peak.", group="Optimization"
    )
    adam_beta1: float = knob(0.9, "AdamW's first beta.", group="Optimization")
    adam_beta2: float = knob(0.95, "AdamW's second beta.", group="Optimization")
    lora_rank: int = knob(
        0,
        "Train a LoRA adapter of this rank on all linear layers but the head (and experts), and freeze the model; 0 trains the model itself.",
        group="Optimization",
        common=True,
        at_least=0,
    )
    lora_alpha: int = knob(
        32, "With --lora-rank: what the adapter adds is multiplied by this / rank.", group="Optimization", at_least=1
    )
    lora_merge: bool = knob(
        False,
        "With --lora-rank: save the final model also with the adapter merged into it, in float32, as model-merged/.",
        group="Optimization",
        free_on_resume=True,
    )
    weight_decay: float = knob(0.0, "AdamW's weight decay.", group="Optimization", at_least=0)
    max_grad_norm: float = knob(1.0, "Clip gradients to this norm.", group="Optimization", above=0)
    micro_batch_tokens: int | None = knob(
        None,
        "Tokens per micro-batch, a shared prompt counted once, in place of a number of responses; auto: as many as fit the "
        "device's memory; on a CPU 2,048. Does not change the result. Default: auto, unless a number of responses is asked for.",
        group="Optimization",
        free_on_resume=True,
        at_least=0,
        auto=0,
    )
    gradient_checkpointing: bool = knob(
        False,
        "Compute activations again in the backward pass instead of keeping them: less memory, more time, the same result.",
        group="Optimization",
        free_on_resume=True,
    )
    fused_kernels: FusedKernels = knob(
        "auto",
        "Kernels for norms, rotary positions, SwiGLU and logits in updates and scores: liger (needs liger-kernel), or none. auto: liger on CUDA "
        "where it is installed and the model is a Llama, Mistral, Qwen2 or Qwen3.",
        group="Optimization",
    )
    max_skipped_updates: int = knob(
        3,
        "Stop the run after this many consecutive updates with non-finite gradients.",
        group="Optimization",
        at_least=1,
    )
    param_dtype: ParamDtype = knob(
        "float32",
        "Precision of the weights and of AdamW's state; bfloat16 halves the memory, but rounds away most small updates unless with "
        "--optimizer adamw_kahan, adamw_8bit, or --offload-optimizer.",
        group="Optimization",
    )
    compute_dtype: ComputeDtype = knob(
        "auto",
        "Precision of the matrix products of training, and of sampling with transformers; the weights keep theirs. "
        "auto: bfloat16 on CUDA, and on a CPU with AVX512_BF16 or AMX for models of 1M parameters or more that transformers samples "
        "from; else that of the weights.",
        group="Optimization",
    )


@dataclass(frozen=True)
class MicroBatchOptions:
    micro_batch_size: int | None = knob(
        None,
        "Responses per forward pass (pairs for dpo; examples for sft, or with --packing as many tokens as so many sequences have); does "
        "not change the result. Default: as --micro-batch-tokens says.",
        group="Optimization",
        free_on_resume=True,
        at_least=1,
    )

    @property
    def units_asked(self) -> int | None:
        return self.micro_batch_size


def check_lora(config: OptimizationOptions) -> None:
    given = {"lora_alpha": config.lora_alpha != 32, "lora_merge": config.lora_merge}
    name = next((name for name, is_given in given.items() if is_given), None)
    if name is not None and not config.lora_rank:
        raise RlvrError(f"{flag(name)} needs --lora-rank.", "Add --lora-rank 32, or leave it out.")


def check_optimizer(config: OptimizationOptions) -> None:
    if config.optimizer == "adamw_kahan" and config.param_dtype != "bfloat16":
        raise RlvrError(
            "--optimizer adamw_kahan keeps what bfloat16 weights round away, and these are float32.",
            "Add --param-dtype bfloat16, or leave --optimizer out.",
        )
    if config.offload_optimizer and config.optimizer != "adamw":
        raise RlvrError(
            f"--offload-optimizer keeps float32 weights and moments on the host: --optimizer {config.optimizer} has no use there.",
            "Leave --optimizer out, or --offload-optimizer.",
        )
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise RlvrError(f"{flag(name)} is {getattr(config, name)}.", "It must be at least 0 and below 1.")
    if rounds_beta2_away(config) and config.sources.get("adam_beta2", "resumed run") != "resumed run":
        raise RlvrError(
            f"--adam-beta2 {config.adam_beta2} is too near 1 for moments in bfloat16: it changes them by less than their last bit, so that "
            "they stay too small, and steps become too large.",
            f"Use at most {HIGHEST_ROUNDED_BETA2}; or keep wider moments with --param-dtype float32 --optimizer adamw, --offload-optimizer, or "
            "--optimizer adamw_8bit.",
        )
    if (config.param_dtype, config.compute_dtype) == ("bfloat16", "float32"):
        raise RlvrError(
            "--compute-dtype is float32, but --param-dtype bfloat16 rounds the weights to 8 significant bits.",
            "Leave --compute-dtype out, or use --param-dtype float32.",
        )


def rounds_beta2_away(config: OptimizationOptions) -> bool:
    """Whether the second moment is in bfloat16, and --adam-beta2 so near 1 that rounding it changes steps by more than 5 %.

    The moment v moves by (1 - beta2) of its distance to the squared gradient, and not at all if that is below half its last bit,
    v / 256 at most. So it comes to rest up to v / (256 (1 - beta2)) away, and a step is off by half that share: 4 % with 0.95, 5 % with
    0.96, 20 % with 0.99. With 0.999 the moment never falls.
    """
    in_bfloat16 = config.param_dtype == "bfloat16" and config.optimizer in ("adamw", "adamw_kahan")
    wide = config.offload_optimizer or config.lora_rank > 0  # an adapter's weights are float32
    return in_bfloat16 and not wide and config.adam_beta2 > HIGHEST_ROUNDED_BETA2
