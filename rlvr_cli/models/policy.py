"""The policy: the one object that knows the internals of a causal language model; other rooms use its methods.

Enters: a model and its tokenizer, from disk (`load.py`) or from memory (`Policy`, `as_policy`). Leaves: hidden
states, the head that maps them to logits, parameters for an optimizer, weights for an inference engine, a frozen
reference policy, a saved model.

What a policy consists of, such as its critic, is known here alone: other code sees what these methods return. `adapter.py` has
the policy with a LoRA adapter, `sharded.py` the one that is divided over processes.
"""

import contextlib
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlvr_cli.models.compute.device import current_device, dtype_name, resolve_compute_dtype
from rlvr_cli.models.compute.liger import fused_kernels, resolve_kernels
from rlvr_cli.models.compute.prefixes import (
    Wanted,
    attention_function,
    gather,
    hidden_states,
    packs_rows,
    shares_prefixes,
)
from rlvr_cli.models.compute.recompute import gradient_checkpointing
from rlvr_cli.models.compute.rounded import rounded_weights
from rlvr_cli.models.pretrained import configured_context, end_tokens, read_pretrained, write_pretrained

CRITIC = "critic."  # prefix of the names of a critic's weights


class Head(NamedTuple):
    """An output layer: logits are `hidden @ weight.T + bias`."""

    weight: Tensor  # (vocabulary, hidden)
    bias: Tensor | None  # (vocabulary,)
    rounded: Tensor | None = None  # the weight in the precision of matrix products, within `Policy.rounded_weights`
    fused: bool = False  # whether `fused_logits` computes what follows from the logits, within `Policy.fused_kernels`


class LowRank(NamedTuple):
    """What an adapter adds to a layer's weight: `up @ down`."""

    down: Tensor  # (rank, in)
    up: Tensor  # (out, rank), the adapter's scaling included


class Lora(NamedTuple):
    """A LoRA adapter to train: of all linear layers but the head."""

    rank: int
    alpha: int  # what the adapter adds is multiplied by alpha / rank
    seed: int  # of its first weights


def trained_adapter(options: Any) -> Lora | None:
    """Return the adapter that options with `lora_rank`, `lora_alpha` and `seed` ask for; None with rank 0."""
    return Lora(options.lora_rank, options.lora_alpha, options.seed) if options.lora_rank else None


class Critic:
    """Estimates the value of each state, the reward that is still to come: a linear map, 0 at first, of hidden states.

    Args:
        policy: whose values it estimates.
        body: a policy of the same architecture, for hidden states of its own; None: it maps those of the policy.
    """

    def __init__(self, policy: "Policy", body: "Policy | None" = None) -> None:
        self.body = body
        trained = next(iter(policy.trainable_parameters().values()))
        self.head = nn.Linear(
            policy.config.get_text_config().hidden_size, 1, device=trained.device, dtype=trained.dtype
        )
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def of(self, hidden: Tensor) -> Tensor:
        """Return the values of hidden states, (positions, hidden) -> (positions,), in float32 or wider."""
        wide = torch.promote_types(torch.promote_types(hidden.dtype, self.head.weight.dtype), torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.to(wide), self.head.weight.to(wide), self.head.bias.to(wide)).squeeze(-1)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return its trainable parameters, by the name that they have among those of the policy. Its body needs no output layer."""
        of_body = {} if self.body is None else dict(self.body.backbone.named_parameters())
        found = {f"body.{name}": parameter for name, parameter in of_body.items() if parameter.requires_grad}
        found |= {f"head.{name}": parameter for name, parameter in self.head.named_parameters()}
        return {f"{CRITIC}{name}": parameter for name, parameter in found.items()}


class Policy:
    """A causal language model to sample from and to train, with its tokenizer.

    Wrapping a model in memory copies nothing: all policies of one model share its weights.

    Attributes:
        model: the transformers model. Any code may use its forward pass and its config; only this class uses its
            internals.
        critic: what estimates values, and is trained with the policy (`add_critic`); None without one.
        kernels: what computes layers, and what follows from logits, within `fused_kernels`: `torch`, or `liger` after `use_kernels`.
        load_again: loads it from where `load.load_policy` did; None for a model from memory, which has no `reference`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        compute_dtype: str = "auto",
    ) -> None:
        """Wrap a model; `compute_dtype` as in `load.load_policy`."""
        self.model, self._tokenizer, self._compute_dtype = model, tokenizer, compute_dtype
        self.load_again: Callable[[], Policy] | None = None
        self._rounded_head: Tensor | None = None
        self.kernels, self._fused = "torch", False
        self.critic: Critic | None = None
        if compute_dtype != "auto":
            resolve_compute_dtype(compute_dtype, weights=self.dtype, device=self.device)  # or raise an error

    # Properties

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        assert self._tokenizer is not None, "this policy has no tokenizer: it was made from a model alone"
        return self._tokenizer

    @property
    def config(self) -> Any:
        """The transformers config of the model."""
        return self.model.config

    @property
    def attention(self) -> str:
        """The attention implementation in use: `flash_attention_2`, `sdpa` or `eager`."""
        return str(self.model.config._attn_implementation)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights."""
        return self.model.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The precision of matrix products, in training, scoring and sampling alike."""
        return resolve_compute_dtype(self._compute_dtype, weights=self.dtype, device=self.device)

    @property
    def facts(self) -> dict[str, str]:
        """What run.json stores about how the policy computes."""
        return {
            "device": str(self.device),
            "attention": self.attention,
            "param_dtype": dtype_name(self.dtype),
            "compute_dtype": dtype_name(self.compute_dtype),
            "kernels": self.kernels,
        }

    @property
    def num_parameters(self) -> int:
        """The number of parameters; tied ones count once."""
        return self.model.num_parameters()

    @property
    def vocabulary_size(self) -> int:
        """The number of token ids with an embedding, often more than the tokenizer has."""
        embeddings: Any = self.model.get_input_embeddings()
        return embeddings.num_embeddings

    @property
    def context_length(self) -> int | None:
        """The most tokens that the model can read, row by row; None if its config sets no limit.

        With a `longrope` position embedding (Phi-3, Phi-4) it is the original context: where one row is longer, all rows of a
        batch get other positions, so that a row's tokens and its gradient would depend on the rows beside it.
        """
        limits = (self._configured_context, self._original_context)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def context_note(self) -> str:
        """Why `context_length` is below what the model's config allows, in parentheses after a space; else empty."""
        if self.context_length == self._configured_context:
            return ""
        return " (its original context: beyond it, its longrope positions depend on the longest row of a batch)"

    @property
    def _configured_context(self) -> int | None:
        return configured_context(self.model.config)

    @property
    def _original_context(self) -> int | None:
        found = getattr(self.model.config.get_text_config(), "rope_parameters", None) or {}
        kinds = [
            found,
            *(kind for kind in found.values() if isinstance(kind, dict)),
        ]  # one, or one for each type of layer
        lengths = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
        return min(lengths, default=None)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a response: the tokenizer's EOS and those of the model's generation config, ascending.

        An id that the model does not have is left out: it is never drawn.
        """
        return tuple(i for i in end_tokens(self.tokenizer, self.model.generation_config) if i < self.vocabulary_size)

    @property
    def is_decoder(self) -> bool:
        """Whether the model is a decoder-only language model."""
        model = self.model
        return (
            not model.config.is_encoder_decoder and model.can_generate() and model.get_output_embeddings() is not None
        )

    # Computation

    def in_one_forward(self, function: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Call a function that uses weights of the model outside its modules' own forward passes, as the head's."""
        return function()

    def forward(self, **inputs: Any) -> Any:
        """Run the whole model; arguments and output are those of transformers."""
        return self.model(**inputs)

    def body(self, **inputs: Any) -> Any:
        """Run the model without its head; arguments are those of transformers, the output has `last_hidden_state`."""
        return self.model.base_model(**inputs)

    def hidden_states(self, input_ids: Tensor, wanted: Wanted) -> Tensor:
        """Compute the last hidden states of the body.

        Args:
            input_ids: (batch, seq), padded on the right.
            wanted: the positions to return, and the distinct prefixes of the rows, if `shares_prefixes`; without them
                every row is computed in full, with its padding.

        Returns:
            (positions, hidden).
        """
        if wanted.prefixes is None:
            states = self.body(input_ids=input_ids, use_cache=False).last_hidden_state.flatten(0, 1)
        else:
            states = hidden_states(self.model, wanted.prefixes)
        return gather(states, wanted.ends)

    @property
    def shares_prefixes(self) -> bool:
        """Whether `hidden_states` accepts prefixes; it does not with the gradient checkpointing of transformers."""
        return self.head() is not None and not self.model.is_gradient_checkpointing and shares_prefixes(self.model)

    @property
    def packs_rows(self) -> bool:
        """Whether `hidden_states` accepts packed prefixes, while it computes in `compute_dtype`."""
        return self.shares_prefixes and packs_rows(self.model, self.compute_dtype)

    def head(self) -> Head | None:
        """Return the output layer if it alone, as a linear map of the hidden states, gives the logits.

        None if the model does more (Gemma's soft capping, Cohere's and Granite's scaling): then only `forward` gives
        the logits.
        """
        if not _has_linear_head(self.model):
            return None
        layer: Any = self.model.get_output_embeddings()
        return Head(layer.weight, layer.bias, self._rounded_head, self._fused)

    def values(self, input_ids: Tensor, wanted: Wanted, hidden: Tensor | None) -> Tensor | None:
        """Compute the critic's values at the wanted positions, (positions,), as `hidden_states` does; None without a critic.

        Args:
            hidden: the policy's own hidden states there, if they are known; a critic without a body of its own needs them.
        """
        if self.critic is None:
            return None
        if self.critic.body is not None:
            with self.critic.body.autocast():
                hidden = self.critic.body.hidden_states(input_ids, wanted)
        assert hidden is not None
        return self.critic.of(hidden)

    @property
    def networks(self) -> "list[Policy]":
        """This policy and, if its critic has a body of its own, that too."""
        return [self] if self.critic is None or self.critic.body is None else [self, self.critic.body]

    def autocast(self, *, enabled: bool = True) -> contextlib.AbstractContextManager[object]:
        """Return a context that computes in `compute_dtype`; if not `enabled`, in the precision of the weights."""
        cast = enabled and self.compute_dtype != self.dtype
        return torch.autocast(self.device.type, self.compute_dtype if cast else None, enabled=cast)

    @contextmanager
    def rounded_weights(self) -> Iterator[None]:
        """Round the weights to `compute_dtype` once for all passes within the block; they must not change meanwhile.

        Their gradients are added in the precision of the weights. Results are those without it; with fused `kernels`, no gradient of a
        linear layer's weight has been rounded.
        """
        dtype, head = self.compute_dtype, self.head()
        if dtype == self.dtype:
            yield
            return
        _ = self.packs_rows  # a model is tested with the weights that it has
        output: Any = self.model.get_output_embeddings()  # its gradient is not rounded, and may be the embedding's too
        try:
            with rounded_weights(self.model, dtype, but=output, unrounded_gradients=self.kernels == "liger"):
                self._rounded_head = None if head is None else head.weight.detach().to(dtype)
                yield
        finally:
            self._rounded_head = None

    def on_its_device(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the policy's device is the current one: see `device.current_device`."""
        return current_device(self.device)

    def attention_function(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model uses the attention function registered under `name`."""
        return attention_function(self.model, name)

    def accepts_attention(self, name: str) -> bool:
        """Return whether the model's attention function can be replaced by this one; some models have a fixed one."""
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(name)
        accepted = self.model.config._attn_implementation == name
        self.model.set_attn_implementation(before or "eager")
        return accepted

    def gradient_checkpointing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the layers keep only their inputs for the backward pass, see `recompute`."""
        return gradient_checkpointing(self.model)

    def use_kernels(self, wanted: str) -> str:
        """Choose the kernels of `fused_kernels`: `auto`, `none` or `liger`; returns a note or the empty string, see `resolve_kernels`."""
        with self.on_its_device():  # Triton launches kernels on the current one
            self.kernels, note = resolve_kernels(self.model, wanted, autocast=self.autocast)
        return note

    @contextmanager
    def fused_kernels(self) -> Iterator[None]:
        """Compute with the chosen `kernels` within the block, backward passes included."""
        self._fused = self.kernels == "liger"
        try:
            with fused_kernels(self.model) if self._fused else contextlib.nullcontext():
                yield
        finally:
            self._fused = False

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch all modules to eval mode; restore the training mode of those that had it on exit."""
        training = [module for module in self._all_modules if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True

    @cached_property
    def _all_modules(self) -> tuple[nn.Module, ...]:
        """All modules of the model, listed once: no code adds or replaces one later, and episodes ask at each turn."""
        return tuple(self.model.modules())

    # Parameters and weights

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters for an optimizer, by name; a tied one appears only under its first name."""
        of_critic = {} if self.critic is None else self.critic.parameters()
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad} | of_critic

    def parameter_groups(self) -> list[list[nn.Parameter]]:
        """Return the trainable parameters of the model and, if there is one, those of the critic.

        Each group has a learning rate and a gradient norm of its own.
        """
        parameters = self.trainable_parameters()
        groups = [
            [p for name, p in parameters.items() if name.startswith(CRITIC) == critic] for critic in (False, True)
        ]
        return [group for group in groups if group]

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors that training can change, tied ones under each of their names; they share memory with the policy.

        With those of `weights`, a policy that was loaded from the same place becomes equal to this one.
        """
        of_critic = {} if self.critic is None else self.critic.parameters()
        return self.model_weights() | {name: parameter.detach() for name, parameter in of_critic.items()}

    def model_weights(self) -> dict[str, Tensor]:
        """Return those of `weights` that are the model's or its adapter's: all but the critic's."""
        return self.model.state_dict()

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy tensors with the names and shapes of `weights` into the policy, in place; of tied ones the first name is read."""
        for name, tensor in distinct_tensors(self.weights()).items():
            tensor.copy_(weights[name])

    def extra_weights(self) -> dict[str, Tensor]:
        """Return those of `weights` that are not in a saved model, such as a critic's."""
        saved = self.saved_weights()
        return {n: tensor for n, tensor in self.weights().items() if n not in saved or not saved[n].is_set_to(tensor)}

    def saved_weights(self) -> Mapping[str, Tensor]:
        """Return the tensors that `save` writes, by their names in `weights` where they have one; tied ones under each name."""
        return self.weights_for_engine()

    def read_saved(self, directory: str | Path) -> dict[str, Tensor]:
        """Read what `save` wrote, on the CPU, by the names of `saved_weights`; no bit is lost.

        It is loaded as a model: for some architectures (mixtures of experts), names and shapes in the files differ from those in
        the module. float32 holds every value of all precisions that are saved.
        """
        model, _ = read_pretrained(directory, dtype="float32", device="cpu")
        return model.state_dict()

    def weights_for_process(self) -> dict[str, Tensor]:
        """Return the weights that a policy of this kind in another process takes over, tied ones only under their first name."""
        return distinct_tensors(self.weights_for_engine())

    def weights_for_engine(self) -> Mapping[str, Tensor]:
        """Return the weights for an inference engine: those of the plain architecture, by their transformers names.

        Tied tensors appear under each of their names. The tensors may be the policy's own: an engine must copy what it
        keeps, or read them again after each update.
        """
        return self.model_weights()

    def factored_weights(self) -> tuple[Mapping[str, Tensor], Mapping[str, LowRank]]:
        """Return the weights of the plain architecture, and what is added to those of some layers, by the layer's name.

        Both together are `weights_for_engine`. An engine that computes in half precision must not add them up: most of what
        an adapter has learned would be rounded away.
        """
        return self.weights_for_engine(), {}

    def load_engine_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load a copy of the `weights_for_engine` of another policy of this architecture.

        Raises:
            RuntimeError: names or shapes differ; some of the weights may have been copied already.
        """
        self.model.load_state_dict(weights)

    def plain_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the modules of the plain architecture, whose weights `weights_for_engine` returns, by name.

        Only for the engine's `decode_step`, which computes the layers of known architectures itself.
        """
        return self.model.named_modules()

    @property
    def backbone(self) -> Any:
        """The module behind `body`, from which the engine's `decode_step` reads head sizes and rotary tables."""
        return self.model.base_model

    # Critic, reference and saving

    def add_critic(self, *, own_body: bool) -> None:
        """Give the policy a critic, whose values are 0 at first.

        Args:
            own_body: load the model a second time, with an adapter if this one has one, for hidden states of the critic's own.
        """
        self.critic = Critic(self, self._loaded_again() if own_body else None)

    def reference(self) -> "Policy":
        """Load the initial policy again, frozen, as the reference of a KL penalty: a second copy of the weights."""
        frozen = self._loaded_again()
        frozen.model.requires_grad_(False)
        return frozen

    def _loaded_again(self) -> "Policy":
        assert self.load_again is not None, "a model from memory cannot be loaded again"
        again = self.load_again()
        again.kernels = self.kernels
        return again

    def write_adapter(self, directory: Path) -> None:
        """Write the adapter, of a policy that has one, into a directory, in peft's layout and without a tokenizer. Raises OSError."""
        raise AssertionError("this policy has no adapter")

    def save(self, directory: str | Path, *, merged: bool = False) -> None:
        """Save model and tokenizer in a form that transformers and vLLM can load, all or nothing.

        An existing model is replaced; see `pretrained.write_pretrained`.

        Args:
            merged: save all weights, in float32, of a policy that otherwise saves only an adapter.
        """
        weights = self.weights_for_engine()
        if merged:
            wide = {tensor.data_ptr(): tensor.float().cpu() for tensor in distinct_tensors(weights).values()}
            weights = {name: wide[tensor.data_ptr()] for name, tensor in weights.items()}  # tied ones stay tied
        write_pretrained(self.model, self.tokenizer, directory, weights=weights)


def as_policy(model: PreTrainedModel | Policy) -> Policy:
    """Wrap a model as a policy without a tokenizer; return a policy unchanged."""
    return model if isinstance(model, Policy) else Policy(model)


def distinct_tensors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by name, tied ones only under their first name. They are the same tensors, not copies."""
    seen: set[int] = set()
    found = {}
    for name, tensor in weights.items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found[name] = tensor
    return found


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity; None if all are finite."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # tensor.isfinite() would allocate a mask of the tensor's size.
        if not all(map(math.isfinite, torch.aminmax(tensor))):
            return name
    return None


_linear_heads: weakref.WeakKeyDictionary[nn.Module, tuple[nn.Module | None, bool]] = weakref.WeakKeyDictionary()


def _has_linear_head(model: nn.Module) -> bool:
    """Return whether the logits are `head(body(input_ids).last_hidden_state)`; tested once per model and head."""
    policy = model if isinstance(model, PreTrainedModel) else None
    head = policy.get_output_embeddings() if policy is not None else None
    known = _linear_heads.get(model)
    if known is None or known[0] is not head:
        known = (head, policy is not None and type(head) is nn.Linear and _probe_linear_head(policy, head))
        _linear_heads[model] = known
        if not known[1]:
            warnings.warn(
                f"The logits of {type(model).__name__} are not one linear map of its hidden states, so the logits of a "
                "whole micro-batch are held in memory at once: it may need smaller micro-batches than other models.",
                stacklevel=3,
            )
    return known[1]


@torch.no_grad()
def _probe_linear_head(model: PreTrainedModel, head: nn.Linear) -> bool:
    """Test the model itself, so that no list of architectures is needed.

    Runs one token. The head must receive exactly the last hidden states of the body, and the head's output must come
    back unchanged as the logits. The output is replaced by values from -100 to 100, which reveal any cap, scale or
    offset.
    """
    seen: dict[str, Tensor | None] = {}

    def see_body(_module: nn.Module, _inputs: object, output: object) -> None:
        seen["body"] = getattr(output, "last_hidden_state", None)

    def plant(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        seen["input"] = inputs[0]
        spread = torch.linspace(-100, 100, output.shape[-1], device=output.device)
        seen["output"] = spread.to(output.dtype).expand_as(output).clone()
        return seen["output"].clone()  # a clone, since the model may change it in place

    body = model.base_model
    if body is model:
        return False
    hooks = [body.register_forward_hook(see_body), head.register_forward_hook(plant)]
    token = torch.zeros((1, 1), dtype=torch.int64, device=head.weight.device)
    devices = [token.device] if token.is_cuda else []
    try:
        with torch.random.fork_rng(devices):  # active dropout must not draw from the run's random numbers here
            logits = model(token, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    hidden, given, planted = seen.get("body"), seen.get("input"), seen.get("output")
    if hidden is None or given is None or planted is None:
        return False
    return torch.equal(hidden, given) and torch.equal(planted.to(logits.dtype), logits)
