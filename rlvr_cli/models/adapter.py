"""A policy with a LoRA adapter: low-rank matrices beside the linear layers of a frozen model, made and stored by peft.

Enters: a model, and the rank of a new adapter; or a directory with an adapter in peft's layout, which names its base. Leaves:
an `AdaptedPolicy`. The adapter's weights are float32 whatever the precision of the base, and are never added to weights in half
precision: an update moves a weight by so little that bfloat16 would lose half of it.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from rlvr_cli.errors import RlvrError, missing_extra
from rlvr_cli.models.compute.bitsandbytes import quiet_bitsandbytes
from rlvr_cli.models.compute.recompute import gradient_checkpointing
from rlvr_cli.models.directory import ADAPTER_WEIGHTS, base_of, local_directory
from rlvr_cli.models.policy import Lora, LowRank, Policy
from rlvr_cli.models.pretrained import load_error, quiet, read_pretrained, replaced, rust_errors_as_os_errors
from rlvr_cli.runs.remote.views import address_of
from rlvr_cli.text import printable

_NAME = "default"  # of the adapter, within the names of its weights: peft leaves it out in files
_PREFIX = "base_model.model."  # of the names in files
_WITHOUT = "Train the model itself, without --lora-rank."


class AdaptedPolicy(Policy):
    """A policy whose own weights are frozen, and an adapter that is trained.

    Attributes:
        base: the model without the adapter: an absolute path, an address in object storage, or a Hub id.
        initial: the adapter's weights in the `reference`; None: there it has no adapter.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        base: str,
        compute_dtype: str = "auto",
    ) -> None:
        """Wrap a model in which peft has put an adapter."""
        super().__init__(model, tokenizer, compute_dtype=compute_dtype)
        self.base, self._layers = base, list(_layers(model))
        self.initial: Mapping[str, Tensor] | None = None

    @contextmanager
    def autocast(self, *, enabled: bool = True) -> Iterator[None]:
        """As that of `Policy`; of half-precision weights too, so that the float32 adapter is multiplied in their precision."""
        cast = enabled and self.compute_dtype.itemsize < 4
        with torch.autocast(self.device.type, self.compute_dtype if cast else None, enabled=cast), self._own_casts():
            yield

    @contextmanager
    def _own_casts(self) -> Iterator[None]:
        """Let peft cast the inputs of adapted layers where autocast does not: it would keep a float32 copy of each."""
        cast = torch.is_autocast_enabled(self.device.type)
        before = [layer.cast_input_dtype_enabled for _, layer in self._layers]
        try:
            for _, layer in self._layers:
                layer.cast_input_dtype_enabled = not cast
            yield
        finally:
            for (_, layer), own in zip(self._layers, before, strict=True):
                layer.cast_input_dtype_enabled = own

    def gradient_checkpointing(self) -> AbstractContextManager[None]:
        return gradient_checkpointing(self.model, again=self._own_casts)

    # Parameters and weights

    def model_weights(self) -> dict[str, Tensor]:
        return _adapter_weights(self.model)

    def saved_weights(self) -> Mapping[str, Tensor]:
        return self.model_weights()

    def read_saved(self, directory: str | Path) -> dict[str, Tensor]:
        return _read_weights(Path(directory))

    def weights_for_process(self) -> dict[str, Tensor]:
        return self.model_weights()

    def weights_for_engine(self) -> Mapping[str, Tensor]:
        weights, added = self.factored_weights()
        merged = {f"{layer}.weight": a for layer, a in added.items()}
        return {  # one by one to the host: a device has no room for a float32 copy of the model
            name: (tensor.float() + merged[name].up @ merged[name].down).cpu() if name in merged else tensor
            for name, tensor in weights.items()
        }

    def factored_weights(self) -> tuple[Mapping[str, Tensor], Mapping[str, LowRank]]:
        state = self.model.state_dict()
        weights = {name.replace(".base_layer.", "."): t for name, t in state.items() if ".lora_" not in name}
        return weights, {name: _low_rank(layer) for name, layer in self._layers}

    def plain_modules(self) -> Iterator[tuple[str, nn.Module]]:
        adapted = {name for name, _ in self._layers}
        for name, module in self.model.named_modules():
            if name.endswith(".base_layer"):
                yield name.removesuffix(".base_layer"), module
            elif name not in adapted and ".lora_" not in name:
                yield name, module

    # Reference and saving

    def reference(self) -> Policy:
        """Return the initial policy: this model without its adapter or, if that was loaded, with its first weights."""
        return _Reference(self)

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        """Make the model compute what the initial policy does within the block."""
        parameters, initial = dict(self.model.named_parameters()), self.initial or {}
        kept = {name: parameters[name].data for name in initial}
        try:
            for name in kept:
                parameters[name].data = initial[name]
            self._use_adapter(bool(initial))
            yield
        finally:
            for name, tensor in kept.items():
                parameters[name].data = tensor
            self._use_adapter(True)

    def _use_adapter(self, used: bool) -> None:
        for _, layer in self._layers:
            layer.enable_adapters(used)

    def save(self, directory: str | Path, *, merged: bool = False) -> None:
        """Save the adapter in peft's layout, and the tokenizer, all or nothing: see `pretrained.replaced`.

        Args:
            merged: save the whole model instead, in float32, with the adapter added to its weights.
        """
        if merged:
            return super().save(directory, merged=True)
        with replaced(directory) as fresh:
            self.write_adapter(fresh)
            with quiet(), rust_errors_as_os_errors():
                self.tokenizer.save_pretrained(fresh)

    def write_adapter(self, directory: Path) -> None:
        peft_config: dict[str, Any] = self.model.peft_config  # type: ignore[assignment]  (peft adds it)
        config = copy.copy(peft_config[_NAME])
        config.base_model_name_or_path, config.inference_mode = self.base, True
        config.target_modules = sorted(config.target_modules)  # a set, whose order differs from process to process
        config.save_pretrained(directory)
        stored = {_in_file(name): t.detach().cpu().contiguous() for name, t in self.model_weights().items()}
        with rust_errors_as_os_errors():
            save_file(stored, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})


class _Reference(Policy):
    """The initial policy of an adapted one, with the same model: it computes only while the other does not."""

    def __init__(self, policy: AdaptedPolicy) -> None:
        super().__init__(policy.model, policy._tokenizer)
        self._policy, self.kernels = policy, policy.kernels

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._policy.compute_dtype

    def autocast(self, *, enabled: bool = True) -> AbstractContextManager[object]:
        return self._policy.autocast(enabled=enabled)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        return {}

    def forward(self, **inputs: Any) -> Any:
        with self._policy.as_loaded():
            return super().forward(**inputs)

    def hidden_states(self, *inputs: Any) -> Tensor:
        with self._policy.as_loaded():
            return super().hidden_states(*inputs)


def load_adapted(
    path_or_id: str | Path, *, dtype: str, compute_dtype: str, device: str, lora: Lora | None
) -> AdaptedPolicy:
    """Load a policy with an adapter: see `load.load_policy`.

    Args:
        lora: the adapter to train; None: the adapter in the directory is not trained.

    Raises:
        RlvrError: also, peft is not installed, or the adapter is of another kind or another model.
    """
    base = base_of(path_or_id)
    model, tokenizer = read_pretrained(path_or_id, dtype=dtype, device=device)
    add_adapter(model, lora, directory=None if base is None else local_directory(path_or_id))
    here = local_directory(base or path_or_id)
    own = str(base or path_or_id) if here is None else address_of(here.absolute()) or str(here.absolute())
    policy = AdaptedPolicy(model, tokenizer, base=own, compute_dtype=compute_dtype)
    if base is not None:
        policy.initial = {name: tensor.detach().clone() for name, tensor in policy.weights().items()}
    return policy


def add_adapter(model: PreTrainedModel, lora: Lora | None, *, directory: Path | None = None) -> None:
    """Freeze a model, and let peft put an adapter into it: a new one, or the one in a directory."""
    quiet_bitsandbytes()  # which peft imports where it is installed
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import cast_adapter_dtype
    except ImportError as error:
        raise missing_extra("peft", "lora") from error
    try:
        config: Any
        if directory is not None:
            config = LoraConfig.from_pretrained(str(directory))
            config.inference_mode = lora is None
            assert lora is None or (config.r, config.lora_alpha) == (lora.rank, lora.alpha), (config, lora)
        else:
            assert lora is not None
            transposed = any(isinstance(module, Conv1D) for module in model.modules())
            config = LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,
                target_modules=_linear_layers(model),
                task_type="CAUSAL_LM",
                fan_in_fan_out=transposed,
            )
        model.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):  # a new adapter is made on the CPU
            torch.manual_seed(0 if lora is None else lora.seed)
            inject_adapter_in_model(config, model, adapter_name=_NAME)
    except (ValueError, TypeError, KeyError) as error:
        if directory is None:
            raise RlvrError(
                f"{type(model).__name__} takes no LoRA adapter: {printable(str(error))}", _WITHOUT
            ) from error
        raise load_error("adapter", str(directory), directory, error) from error
    cast_adapter_dtype(model, _NAME)
    model.eval()  # new layers are in train mode
    _check_kind(model, directory)
    if directory is not None:
        stored, wanted = _read_weights(directory), _adapter_weights(model)
        _check_fit(stored, wanted, directory)
        for name, tensor in wanted.items():
            tensor.copy_(stored[name])


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers that get an adapter: all but the head, and but routers and others that subclass them.

    In some mixtures of experts, peft takes names such as gate_proj for those of experts, which are one tensor: layers with these
    names get none, since peft would adapt that tensor instead.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if _is_linear(module) and module is not head]
    read_by_peft = LoraConfig(target_modules=names)
    convert_peft_config_for_transformers(read_by_peft, model, None)
    if not read_by_peft.target_modules:
        raise RlvrError(f"{type(model).__name__} has no linear layers for a LoRA adapter.", _WITHOUT)
    return sorted(read_by_peft.target_modules)


def _is_linear(module: nn.Module) -> bool:
    """Whether a module computes what its class says: subclasses may return more, or take the weight in parts. Falcon's does not."""
    return type(module) in (nn.Linear, Conv1D) or type(module).__name__ == "FalconLinear"


def _low_rank(layer: Any) -> LowRank:
    """Return what an adapter adds to a layer's weight; that of a GPT-2 is (in, out), and so are the matrices then."""
    down, up = layer.lora_A[_NAME].weight.detach(), layer.lora_B[_NAME].weight.detach() * layer.scaling[_NAME]
    return LowRank(up.T, down.T) if layer.fan_in_fan_out else LowRank(down, up)


def _adapter_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the adapter's tensors by name; they share memory with the model."""
    return {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}


def _check_fit(stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor], directory: Path) -> None:
    """Raise RlvrError unless the stored weights have the names and shapes that the model wants."""
    for name in sorted(stored.keys() | wanted.keys()):
        if name not in stored:
            what = "is missing"
        elif name not in wanted:
            what = "belongs to no linear layer"
        elif stored[name].shape != wanted[name].shape:
            what = f"is {tuple(stored[name].shape)} and should be {tuple(wanted[name].shape)}"
        else:
            continue
        raise RlvrError(
            f"The adapter in {printable(str(directory))} does not fit its base: {printable(name)} {what}.",
            "Copy the adapter again, or put back the base that it was trained on.",
        )


def _check_kind(model: PreTrainedModel, directory: Path | None) -> None:
    """Raise RlvrError unless the adapter, a new one or that of a directory, is plain LoRA of linear layers."""
    from peft.tuners.lora.layer import Linear

    if any(
        type(layer) is not Linear or layer.lora_variant or any(layer.lora_bias.values()) for _, layer in _layers(model)
    ):
        if directory is None:
            raise RlvrError(f"peft adapts more than the linear layers of {type(model).__name__}.", _WITHOUT)
        raise RlvrError(
            f"The adapter in {printable(str(directory))} is not plain LoRA of linear layers.",
            "Merge it into its base with peft, and use the merged model.",
        )


def _layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Iterate over the layers with an adapter, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))


def _in_file(name: str) -> str:
    return _PREFIX + name.replace(f".{_NAME}.", ".")


def _read_weights(directory: Path) -> dict[str, Tensor]:
    """Read the adapter's weights in a directory, on the CPU, by their names in the model."""
    try:
        stored = load_file(directory / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise load_error("adapter", str(directory), directory, error) from error
    # Clone, because load_file maps the file, which may be removed.
    return {name.removeprefix(_PREFIX).replace(".weight", f".{_NAME}.weight"): t.clone() for name, t in stored.items()}
