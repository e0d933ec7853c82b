"""The policy: one object that knows what is inside a causal language model, so that nothing outside this room has to.

Enters: a model and its tokenizer, from disk (`load_policy`) or from memory (`Policy`, `policy_of`). Leaves: hidden states and the
head that makes logits of them, parameters for an optimizer, weights for an engine, a reference to compare with, a saved model.

An adapter, a second head or weights that are spread over devices change what these methods give, and nothing else.
"""

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlvr_cli.models.device import autocast_context, autocast_dtype
from rlvr_cli.models.prefixes import Prefixes, gather, hidden_states, shares_prefixes
from rlvr_cli.models.pretrained import read_pretrained, write_pretrained


class Head(NamedTuple):
    """An output layer: logits are `hidden @ weight.T + bias`."""

    weight: Tensor  # (vocabulary, hidden)
    bias: Tensor | None  # (vocabulary,)


class Source(NamedTuple):
    """What `load_policy` read a policy from."""

    path_or_id: str | Path
    dtype: str


class Policy:
    """A causal language model that is sampled from and trained, with the tokenizer it was trained with.

    It holds nothing but these two: making one of a model in memory costs nothing, and all policies of a model share its weights.

    Attributes:
        model: of transformers. Its forward pass and its config are for everyone; what is inside of it is for this class.
        source: where it was loaded from; None for a model from memory, which has no `reference`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        source: Source | None = None,
    ) -> None:
        self.model, self.source = model, source
        self._tokenizer = tokenizer

    # What it is

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        assert self._tokenizer is not None, "this policy was made of a model alone"
        return self._tokenizer

    @property
    def config(self) -> Any:
        """The model's config, of transformers."""
        return self.model.config

    @property
    def attention(self) -> str:
        """The attention implementation in use, for run.json: `flash_attention_2` or `sdpa`."""
        return str(self.model.config._attn_implementation)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights."""
        return self.model.dtype

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The precision of the products where it is not that of the weights: bfloat16 for float32 on CUDA."""
        return autocast_dtype(self.model)

    @property
    def num_parameters(self) -> int:
        """Tied ones count once."""
        return self.model.num_parameters()

    @property
    def vocabulary_size(self) -> int:
        """How many token ids have an embedding: those of the tokenizer, and often some more."""
        embeddings: Any = self.model.get_input_embeddings()
        return embeddings.num_embeddings

    @property
    def context_length(self) -> int | None:
        """The most tokens that it reads; None where its positions have no end."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def is_decoder(self) -> bool:
        """Whether it generates from a prompt alone, without an encoder."""
        model = self.model
        return (
            not model.config.is_encoder_decoder and model.can_generate() and model.get_output_embeddings() is not None
        )

    # What it computes

    def forward(self, **inputs: Any) -> Any:
        """The whole model: arguments and output are those of transformers."""
        return self.model(**inputs)

    def body(self, **inputs: Any) -> Any:
        """The model without its head: arguments of transformers, an output with `last_hidden_state`."""
        return self.model.base_model(**inputs)

    def hidden_states(self, input_ids: Tensor, mask: Tensor, prefixes: Prefixes | None = None) -> Tensor:
        """The body's last hidden states at some positions.

        Args:
            input_ids: (batch, seq), padded on the right.
            mask: (batch, seq), bool: the positions.
            prefixes: the distinct prefixes of the rows, for a policy that `shares_prefixes`; None: row by row, padding too.

        Returns:
            (positions, hidden).
        """
        if prefixes is None:
            return self.body(input_ids=input_ids, use_cache=False).last_hidden_state[mask]
        return gather(hidden_states(self.model, prefixes), prefixes.places[mask])

    @property
    def shares_prefixes(self) -> bool:
        """Whether `hidden_states` takes prefixes; recomputation in the backward pass forbids it."""
        return self.head() is not None and not self.model.is_gradient_checkpointing and shares_prefixes(self.model)

    def head(self) -> Head | None:
        """The output layer, where the logits are this one linear map of the hidden states.

        None: something else is done to them (Gemma's soft capping, Cohere's and Granite's scaling), and `forward` alone knows them.
        """
        if not _has_linear_head(self.model):
            return None
        layer: Any = self.model.get_output_embeddings()
        return Head(layer.weight, layer.bias)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Compute in `autocast_dtype`, for training and for scoring alike."""
        return autocast_context(self.model)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """No module of the model in training mode; those that were are put back."""
        training = [module for module in self.model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True

    # What it is made of

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """What an optimizer moves, by name; a tied one under its first name alone."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        """All tensors by name, tied ones under each of their names: the policy's own, not copies, without gradients."""
        return self.model.state_dict()

    def weights_for_engine(self) -> Mapping[str, Tensor]:
        """The weights as an engine wants them: those of the plain architecture, under the names that they have in transformers.

        Tied ones come under each of their names. They may be the policy's own: an engine copies what it keeps, or reads it anew
        after each update.
        """
        return self.weights()

    def load_engine_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the `weights_for_engine` of another policy of this architecture.

        Raises:
            RuntimeError: their names or shapes are others; some may have been copied.
        """
        self.model.load_state_dict(weights)

    def plain_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules, by name, that `weights_for_engine` has the weights of, for an engine with code of its own for them."""
        return self.model.named_modules()

    @property
    def backbone(self) -> Any:
        """The module behind `body`, for an engine that reads constants of the architecture: head sizes, rotary tables."""
        return self.model.base_model

    # What becomes of it

    def reference(self) -> "Policy":
        """The policy as it was when it was loaded, frozen: what a KL penalty compares with. It takes the weights' memory again."""
        assert self.source is not None, "a model from memory has no state that it was loaded in"
        frozen = load_policy(self.source.path_or_id, dtype=self.source.dtype, device=str(self.device))
        frozen.model.requires_grad_(False)
        return frozen

    def save(self, directory: str | Path) -> None:
        """Write model and tokenizer so that transformers and vLLM load them as they stand, all or nothing.

        A model that is already there is replaced; see `pretrained.write_pretrained`.
        """
        write_pretrained(self.model, self.tokenizer, directory, weights=self.weights_for_engine())


def policy_of(model: PreTrainedModel | Policy) -> Policy:
    """A model as a policy without a tokenizer; a policy as it is."""
    return model if isinstance(model, Policy) else Policy(model)


def load_policy(path_or_id: str | Path, *, dtype: str = "float32", device: str = "auto") -> Policy:
    """Load a causal language model, in eval mode, and its tokenizer.

    Attention is flash-attention 2 where it can run (CUDA, the package installed, weights in half precision), else
    PyTorch's own; `Policy.attention` says which. A tokenizer without a padding token pads with EOS.

    Args:
        path_or_id: a model directory, or else a Hugging Face Hub id. A directory is read without any network access.
        dtype: of the parameters: float32, bfloat16 or float16.
        device: `auto` (CUDA if there is one), `cpu`, `cuda`, `cuda:N` or `mps`.

    Raises:
        RlvrError: no such model, no safetensors in it, a part of it missing or damaged, a tokenizer that does not
            belong to it, or no such device.
    """
    model, tokenizer = read_pretrained(path_or_id, dtype=dtype, device=device)
    return Policy(model, tokenizer, source=Source(path_or_id, dtype))


def distinct(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by name, tied ones under their first name alone. They are the same tensors, not copies."""
    seen: set[int] = set()
    found = {}
    for name, tensor in weights.items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found[name] = tensor
    return found


_linear_heads: weakref.WeakKeyDictionary[nn.Module, tuple[nn.Module | None, bool]] = weakref.WeakKeyDictionary()


def _has_linear_head(model: nn.Module) -> bool:
    """Whether the model's logits are `head(body(input_ids).last_hidden_state)`; found out once per model and head."""
    policy = model if isinstance(model, PreTrainedModel) else None
    head = policy.get_output_embeddings() if policy is not None else None
    known = _linear_heads.get(model)
    if known is None or known[0] is not head:
        known = (head, policy is not None and type(head) is nn.Linear and _probe_linear_head(policy, head))
        _linear_heads[model] = known
        if not known[1]:
            warnings.warn(
                f"The logits of {type(model).__name__} are not one linear map of its hidden states, so the logits of a "
                "whole micro-batch are held in memory at once: it may have to be smaller than for other models.",
                stacklevel=3,
            )
    return known[1]


@torch.no_grad()
def _probe_linear_head(model: PreTrainedModel, head: nn.Linear) -> bool:
    """Ask the model itself, instead of a list of architectures.

    One token goes through it. The head must be given exactly the body's last hidden states, and what the head returns
    must come back as the logits untouched; a planted output, spread over ±100, would show any cap, scale or offset.
    """
    seen: dict[str, Tensor | None] = {}

    def see_body(_module: nn.Module, _inputs: object, output: object) -> None:
        seen["body"] = getattr(output, "last_hidden_state", None)

    def plant(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        seen["input"] = inputs[0]
        spread = torch.linspace(-100, 100, output.shape[-1], device=output.device)
        seen["output"] = spread.to(output.dtype).expand_as(output).clone()
        return seen["output"].clone()  # the model may change its own in place

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
