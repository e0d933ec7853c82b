"""CUDA devices for a machine without one: ``with fake_cuda() as cuda:``.

Tensors say that they are on `cuda:0` or `cuda:1`, and hold their numbers on the CPU. Operators on them check what CUDA checks:
all tensors on one device, and no wait for a stream that is captured. A graph holds the kernels of the stream that it captured,
and no others. What happens is counted: kernels, their work, attention, copies, waits of the host for a device.

With ``compute=False`` floating-point numbers are not computed, only shapes and types, so that real models take seconds.

Replaced is only what is below PyTorch's operators: the device's guard, streams, graphs and memory, attention's choice of a
kernel, autograd's threads. `tests/test_fake_cuda.py` compares it with a real device where there is one.
"""

import ctypes
import importlib.util
import itertools
import math
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch.utils import _foreach_utils
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import rlvr_cli
from rlvr_cli.models.compute.bitsandbytes import import_bitsandbytes

aten = torch.ops.aten
_PACKAGE = str(Path(rlvr_cli.__file__).parent)
_COPIES = (aten._to_copy.default, aten.copy_.default)
_INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
_READ_BY_THE_HOST = {  # what of the result: a number, or its length
    aten._local_scalar_dense.default: "number",
    aten.equal.default: "number",
    aten.nonzero.default: "length",
    aten.masked_select.default: "length",
}
_NO_KERNEL = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "detach",
    "lift_fresh",
}
_READ_IN_PART = {"embedding", "gather", "index", "index_select"}  # as much of the first operand as of the result
_WRITTEN_IN_PART = {"_index_put_impl_", "index_add_", "index_copy_", "index_put_", "scatter_", "scatter_add_"}
_ONLY_WRITTEN = {"copy_", "fill_", "zero_"}  # the first operand is not read
NAME, MEMORY = "Emulated", 2**36  # of a device; all bytes are free


def _leaves(values: Any) -> list[Any]:
    """What is in nested tuples, lists and dicts of an operator's operands and results; torch's own functions take far longer."""
    if not isinstance(values, tuple | list | dict):
        return [values]
    found = []
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, tuple | list | dict):
            found += _leaves(value)
        else:
            found.append(value)
    return found


def _mapped(kind: type, function: Callable[[Any], Any], values: Any) -> Any:
    """The same nested values with the function's value in place of each leaf of this kind."""
    if isinstance(values, kind):
        return function(values)
    if isinstance(values, tuple | list):
        return type(values)([_mapped(kind, function, value) for value in values])
    if isinstance(values, dict):
        return {name: _mapped(kind, function, value) for name, value in values.items()}
    return values


class CudaTensor(torch.Tensor):
    """A tensor on a device that does not exist; `value` holds its numbers, or on `meta` its shape alone."""

    value: torch.Tensor

    @staticmethod
    def __new__(cls, value: torch.Tensor, device: torch.device) -> "CudaTensor":
        layout = {"strides": value.stride(), "storage_offset": value.storage_offset()}
        self = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=device, **layout)
        self.value = value
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} on a device that exists only within fake_cuda()")

    # With these two, `Module.to` puts a parameter's new tensor in the place of the old one.
    def __tensor_flatten__(self):
        return ["value"], self.device

    @staticmethod
    def __tensor_unflatten__(inner, device, size, stride):
        return CudaTensor(inner["value"], device)

    def data_ptr(self):
        return self.value.data_ptr()

    def storage(self):
        return self.value.storage()

    def untyped_storage(self):
        return self.value.untyped_storage()

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, **kwargs):
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu().")


class Attention(NamedTuple):
    """A call of `scaled_dot_product_attention`."""

    kernel: str  # flash, efficient or math
    dtype: torch.dtype
    query: torch.Size
    keys: torch.Size
    mask: torch.Size | None


class Work(NamedTuple):
    """What a kernel does: the bytes that it must read and write, and its floating-point operations in products."""

    name: str
    bytes: int
    flops: int


class Stream:
    """A `torch.cuda.Stream`."""

    cuda: "FakeCuda"

    def __init__(self, device: Any = None, **options: object) -> None:
        self.device = self.cuda.device(device)

    def wait_stream(self, other: "Stream") -> None:
        assert isinstance(other, Stream)

    def synchronize(self) -> None:
        self.cuda.waits["stream", _place()] += 1


class Graph:
    """A `torch.cuda.CUDAGraph`: the kernels of one stream, which run again, on the same memory, when it is replayed."""

    cuda: "FakeCuda"

    def __init__(self, **options: object) -> None:
        self.kernels: list[tuple[Callable[[], Any], Any]] = []
        self.work: list[Work] = []

    def capture_begin(self, *pool: object, **options: object) -> None:
        self.stream = self.cuda.stream()
        if self.stream in self.cuda.default_streams:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self.cuda.graph = self

    def capture_end(self) -> None:
        self.cuda.graph = None
        self.cuda.captured[str(self.stream.device)] += 1

    def add(self, kernel: Callable[[], Any], *, in_place: bool) -> Any:
        """Add a kernel without running it; return memory for its results, with nothing useful in it."""
        results = None if in_place else kernel()
        for result in _leaves(results):
            if isinstance(result, torch.Tensor):
                result.fill_(torch.nan if result.is_floating_point() else 1)
        self.kernels.append((kernel, results))
        return results

    def replay(self) -> None:
        self.cuda.replayed[str(self.stream.device)] += 1
        self.cuda.replayed_work += self.work
        for kernel, results in self.kernels:
            new = kernel()
            if results is not None:
                for result, number in zip(_leaves(results), _leaves(new), strict=True):
                    if isinstance(result, torch.Tensor):
                        result.copy_(number)


class FakeCuda(TorchDispatchMode):
    """The devices, and what happened on them.

    Attributes:
        current: the index of the current device.
        kernels: operators other than views, by name.
        work, replayed_work: of the kernels that were launched, and of those that graphs ran.
        types: those of their operands, by name.
        shapes: of all results.
        attentions: calls of attention.
        waits: how often the host waited for a device, by (why, "module.py:function" of the package that made it wait). Copies
            wait, except those of pinned memory that are asked not to.
        uploads: copies from the host's memory, by that function.
        astray: kernels on a device that is not the current one, by that function.
        captured, replayed: graphs, by device.
        before_kernel: called with the name of each kernel; it may raise what a device would.
        allocated, peak: bytes of the tensors that are on a device, now and at most.
    """

    def __init__(self, *, compute: bool, count: int) -> None:
        super().__init__()
        self.compute, self.current = compute, 0
        self.Stream, self.Graph = type("Stream", (Stream,), {"cuda": self}), type("Graph", (Graph,), {"cuda": self})
        self.streams = [self.Stream(index) for index in range(count)]  # each device's current one
        self.default_streams = tuple(self.streams)
        self.graph: Graph | None = None  # the one that is being captured
        self.before_kernel: Callable[[str], None] = lambda name: None
        self.captured: Counter[str] = Counter()
        self.replayed: Counter[str] = Counter()
        self.pinned: set[int] = set()  # addresses of the host's storages that are pinned
        self.allocated = self.peak = 0
        self.storages: dict[int, int] = {}  # bytes, by the storage's address
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self.peak = self.allocated
        self.kernels: Counter[str] = Counter()
        self.work: list[Work] = []
        self.replayed_work: list[Work] = []
        self.types: dict[str, set[tuple[torch.dtype, ...]]] = defaultdict(set)
        self.shapes: set[torch.Size] = set()
        self.attentions: list[Attention] = []
        self.waits: Counter[tuple[str, str]] = Counter()
        self.uploads: Counter[str] = Counter()
        self.astray: Counter[str] = Counter()

    def device(self, device: Any = None) -> torch.device:
        """The device that a function of `torch.cuda` means; without an index, the current one."""
        index = device if isinstance(device, int | None) else torch.device(device).index
        return torch.device("cuda", self.current if index is None else index)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """`Tensor.pin_memory`"""
        assert not isinstance(tensor, CudaTensor), "only memory of the host can be pinned"
        return self._pinned(tensor.clone())

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.pinned.add(storage._cdata)
        weakref.finalize(storage, self.pinned.discard, storage._cdata)
        return tensor

    def stream(self, device: Any = None) -> Stream:
        return self.streams[self.device(device).index]

    def set_stream(self, stream: Stream) -> None:
        self.current = stream.device.index
        self.streams[self.current] = stream

    def exchange_device(self, index: int) -> int:
        before, self.current = self.current, self.current if index < 0 else index
        return before

    def with_index(self, device: Any) -> Any:
        """The same device with its index; anything else unchanged."""
        known = isinstance(device, torch.device) or device == "cuda"
        return self.device(device) if known and torch.device(device).type == "cuda" else device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, CudaTensor)]
        wanted = self.with_index(kwargs.get("device"))
        pinned = bool(kwargs.get("pin_memory"))
        if pinned:  # without a device, torch has no such memory
            kwargs = {**kwargs, "pin_memory": False}
        if not ours and (wanted is None or wanted.type != "cuda"):
            result = func(*args, **kwargs)
            return self._pinned(result) if pinned else result
        if func is not aten.silu_backward.default:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in _COPIES:
            return self._copy(func, args, kwargs)
        device = wanted or ours[0].device
        self._check(func, args, [tensor for tensor in tensors if tensor.device != device and tensor.dim() > 0], device)
        if func in _INDEXING:
            args = (args[0], [place for index in args[1] for place in _places(index)], *args[2:])
        inner_args, inner_kwargs = _mapped(CudaTensor, lambda tensor: tensor.value, (args, kwargs))
        leaves = _leaves((inner_args, inner_kwargs))
        if unknown := any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
            if func in _READ_BY_THE_HOST:
                assert _READ_BY_THE_HOST[func] == "number", f"{func} depends on numbers that are not computed"
                return func is aten.equal.default or _guess(ours[0].value).item()
            inner_args, inner_kwargs = _mapped(torch.Tensor, _shape_of, (inner_args, inner_kwargs))
        if wanted is not None:
            inner_kwargs["device"] = "meta"
            if not unknown and (self.compute or not func(*inner_args, **inner_kwargs).is_floating_point()):
                inner_kwargs["device"] = "cpu"
        on_cpu = _ONLY_ON_CUDA.get(func, func)
        results = self._launch(func, partial(on_cpu, *inner_args, **inner_kwargs), device, tensors)
        if func._schema.is_mutable:
            return args[0] if func._schema.returns else None
        # As in torch, a view is an inference tensor only if its base is one.
        inference = torch.is_inference_mode_enabled() and not (func.is_view and not args[0].is_inference())
        with torch.inference_mode(inference):
            return _mapped(torch.Tensor, partial(self._wrapped, device=device), results)

    def _check(self, func, args, elsewhere: list[torch.Tensor], device: torch.device) -> None:
        """Refuse operands elsewhere than on the device, and count what the host waits for."""
        if func in _INDEXING:
            indices = [index for index in args[1] if index is not None]
            on_host = [index for index in indices if index.device.type == "cpu"]  # they are copied to the device
            elsewhere = [tensor for tensor in elsewhere if not any(tensor is index for index in on_host)]
            if on_host:
                self._note(device, upload=True)
                self._note(device, why="upload")
            masked = any(index.dtype == torch.bool for index in indices)
            if masked and (func is aten.index.Tensor or args[2].numel() != 1):  # else it is a `masked_fill`
                self._note(device, why="length")
        elif func in _READ_BY_THE_HOST:
            self._note(device, why=_READ_BY_THE_HOST[func])
        if elsewhere:
            found = f"{device} and {elsewhere[0].device}"
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {found}! ({func})"
            )

    def _copy(self, func, args, kwargs) -> torch.Tensor:
        """Copy within a device, between devices, or between a device and the host."""
        onto, source = args[:2] if func is aten.copy_.default else (None, args[0])
        device = onto.device if onto is not None else self.with_index(kwargs.get("device")) or source.device
        at_once = kwargs.get("non_blocking", args[2] if func is aten.copy_.default and len(args) > 2 else False)
        if device.type == "cpu":
            if not at_once or onto is not None:  # for a new tensor, torch takes pinned memory
                self._note(source.device, why="copy")
        elif source.device.type == "cpu":
            if source.dim() > 0:
                self._note(device, upload=True)
            if not (at_once and source.untyped_storage()._cdata in self.pinned):
                self._note(device, why="upload")
        value = source.value if isinstance(source, CudaTensor) else source
        if onto is None:
            new = self._launch(func, partial(func, value, **{**kwargs, "device": None}), device, [source])
            return self._wrapped(new, device=device)
        inside = onto.value if isinstance(onto, CudaTensor) else onto
        if inside.is_meta:
            value = _shape_of(value)
        elif value.is_meta:
            value = _guess(value)
        self._launch(func, partial(inside.copy_, value), device, [onto, source])
        return onto

    def _launch(self, func, kernel: Callable[[], Any], device: torch.device, operands: list[torch.Tensor]) -> Any:
        """Run a kernel, or put it into the graph that captures its stream."""
        if not func.is_view and device.type == "cuda":
            name = func._schema.name.removeprefix("aten::")
            self.kernels[name] += 1
            self.types[name].add(tuple(tensor.dtype for tensor in operands))
            if device.index != self.current:
                self.astray[_place()] += 1
            self.before_kernel(name)
            captures = self._captures(device)
            results = self.graph.add(kernel, in_place=func._schema.is_mutable) if captures else kernel()
            if name not in _NO_KERNEL:
                (self.graph.work if captures else self.work).append(_work_of(func, name, kernel, operands, results))
            return results
        return kernel()

    def _captures(self, device: torch.device) -> bool:
        return self.graph is not None and self.stream(device) is self.graph.stream

    def _note(self, device: torch.device, *, why: str = "", upload: bool = False) -> None:
        """Count a wait of the host for a device, or a copy to it."""
        if self._captures(device):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if upload:
            self.uploads[_place()] += 1
        else:
            self.waits[why, _place()] += 1

    def _wrapped(self, value: torch.Tensor, *, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return _guess(value) if value.is_meta else value
        if not self.compute and value.is_floating_point():
            value = _shape_of(value)
        self.shapes.add(value.shape)
        self._hold(value.untyped_storage())
        return CudaTensor(value, device)

    def _hold(self, storage: torch.UntypedStorage) -> None:
        """Count the bytes of a storage until no tensor has it any more."""
        place, size = storage._cdata, storage.nbytes()
        if place not in self.storages:
            self.storages[place] = size
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
            weakref.finalize(storage, self._release, place)

    def _release(self, place: int) -> None:
        self.allocated -= self.storages.pop(place)

    def attention(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        """What `scaled_dot_product_attention` does on CUDA, by its choice of a kernel (`sdp_utils.cpp`)."""
        if torch.is_autocast_enabled("cuda"):
            lower = torch.get_autocast_dtype("cuda")
            query, key, value = query.to(lower), key.to(lower), value.to(lower)
            attn_mask = attn_mask.to(lower) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        assert query.dtype == key.dtype == value.dtype, "attention of several types"
        assert attn_mask is None or attn_mask.dtype in (torch.bool, query.dtype), "a mask of another type"
        kernel = "math" if query.dtype == torch.float64 or enable_gqa else "efficient"
        if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
            kernel = "flash"
        mask = None if attn_mask is None else attn_mask.shape
        self.attentions.append(Attention(kernel, query.dtype, query.shape, key.shape, mask))
        given = (dropout_p, is_causal)
        if self.compute or kernel == "math":
            options = {"scale": scale, "enable_gqa": enable_gqa}
            return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, *given, **options)[0]
        if kernel == "flash":
            return aten._scaled_dot_product_flash_attention(query, key, value, *given, scale=scale)[0]
        bias = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
        given = (query.requires_grad, *given)
        return aten._scaled_dot_product_efficient_attention(query, key, value, bias, *given, scale=scale)[0]


def _place() -> str:
    """The function of the package that is running, as "module.py:function"."""
    frame = sys._getframe()
    while frame and (frame.f_code.co_name[0] == "<" or not frame.f_code.co_filename.startswith(_PACKAGE)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}" if frame else ""


def _bytes_of(tensor: torch.Tensor) -> int:
    """The bytes that its elements take in memory; expanded ones share theirs."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(size for size, stride in pairs if stride or not size)


def _work_of(func, name: str, kernel: partial, operands: list[torch.Tensor], results: Any) -> Work:
    given = [_bytes_of(tensor) for tensor in dict.fromkeys(operands)]  # one of them may be the result too
    made = sum(_bytes_of(leaf) for leaf in _leaves(results) if isinstance(leaf, torch.Tensor))
    if name in _READ_IN_PART:
        moved = sum(given[1:]) + 2 * made
    elif name in _WRITTEN_IN_PART:
        moved = sum(given[1:]) + (3 if "add" in name else 2) * (given[-1] if len(given) > 1 else 0)
    elif name == "_fused_adamw_":
        moved = sum(given) * 7 // 4  # of parameter, gradient and two moments, the gradient is not written
    elif name.startswith("_foreach") and func._schema.is_mutable:
        moved = 2 * sum(given)
    elif func._schema.is_mutable:
        moved = sum(given) + (0 if name in _ONLY_WRITTEN else given[0])
    else:
        moved = sum(given) + made
    count = flop_registry.get(func.overloadpacket)
    given_to = (
        kernel.args[:3] if func is aten.addmm.dtype_out else kernel.args
    )  # without the type, which `count` does not know
    return Work(name, moved, 0 if count is None else count(*given_to, **kernel.keywords, out_val=results))


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")


def _guess(value: torch.Tensor) -> torch.Tensor:
    """What the host sees of numbers that are not computed: 0.0, 1, True."""
    return torch.full_like(value, not value.is_floating_point(), device="cpu")


def _places(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """An index as numbers: a mask becomes one index for each of its dimensions."""
    if index is None or index.dtype != torch.bool:
        return [index]
    value = index.value if isinstance(index, CudaTensor) else index
    assert not value.is_meta, "a mask of numbers that are not computed"
    return list(value.nonzero(as_tuple=True))


def _wide_product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return a.to(dtype) @ b.to(dtype)


def _add_wide_product(
    total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, *, out: torch.Tensor
) -> torch.Tensor:
    assert out is total
    return out.addmm_(a.to(dtype), b.to(dtype))


_ONLY_ON_CUDA = {
    aten.mm.dtype: _wide_product,
    aten.addmm.dtype_out: _add_wide_product,
}  # products that the CPU does not have


def _accumulate(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Add a gradient to that of a parameter, or let it be that of the parameter; and call the hooks."""
    if gradient is None:
        return
    if parameter.grad is None:
        parameter.grad = gradient.contiguous()
    else:
        parameter.grad.add_(gradient)
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)


@torch.no_grad()
def _backward(root: torch.Tensor) -> None:
    """Do what autograd's engine does from a scalar: it has no thread for a device that is not there."""
    missing: Counter[Any] = Counter()  # gradients that a node still waits for
    gradients: dict[Any, list[torch.Tensor | None]] = {root.grad_fn: [torch.ones_like(root)]}
    new = [root.grad_fn]
    while new:
        for node, _ in new.pop().next_functions:
            missing[node] += 1
            if node is not None and node not in gradients:
                gradients[node] = [None] * len(node._input_metadata)
                new.append(node)
    ready = [root.grad_fn]
    while ready:
        node = ready.pop()
        edges = node.next_functions
        if hasattr(node, "variable"):
            _accumulate(node.variable, *gradients.pop(node))
            continue
        written_in_python = isinstance(node, torch.autograd.function.BackwardCFunction)
        results = (node.apply if written_in_python else node)(*gradients.pop(node))
        results = results if isinstance(results, tuple) else (results,)
        if written_in_python:  # a result for each argument, an edge for each tensor
            given = len(node.needs_input_grad)
            assert all(result is None for result in results[given:]), "more gradients than arguments"
            results = [result for result, needed in zip(results[:given], node.needs_input_grad, strict=True) if needed]
            edges = [edge for edge in edges if edge[0] is not None]
        for (target, place), gradient in zip(edges, results, strict=True):
            if target is None:
                continue
            if gradient is not None:
                like, before = target._input_metadata[place], gradients[target][place]
                assert gradient.device == like.device, f"a gradient on {gradient.device}, of a tensor on {like.device}"
                gradient = gradient.sum_to_size(like.shape).to(like.dtype)
                gradients[target][place] = gradient if before is None else before + gradient
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
        del results, gradient  # the engine keeps none


@contextmanager
def freeing_as_it_goes() -> Iterator[None]:
    """Within the block, a backward pass lets go of what was saved for a node when it has computed that node, as the engine does."""

    def unpack(saved: list[torch.Tensor]) -> torch.Tensor:
        return saved.pop()

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: [tensor], unpack):
        yield


@contextmanager
def _device_guard() -> Iterator[None]:
    """Give CUDA the guard of the device `meta`, which does nothing: without a guard, torch refuses to index such a tensor."""
    try:
        (c10,) = (p for p in (Path(torch.__file__).parent / "lib").iterdir() if p.name in ("libc10.so", "libc10.dylib"))
        # c10::impl::device_guard_impl_registry, a pointer for each type of device: CUDA is 1, meta is 14
        guards = (ctypes.c_void_p * 15).in_dll(ctypes.CDLL(str(c10)), "_ZN3c104impl26device_guard_impl_registryE")
    except (ValueError, OSError):
        pytest.skip("this build of torch does not show its device guards")
    before, guards[1] = guards[1], guards[14]
    try:
        yield
    finally:
        guards[1] = before


@contextmanager
def _own_kernels() -> Iterator[None]:
    """Let SiLU's backward pass be one kernel, as in a build for CUDA; in others, torch computes it from seven operators there."""
    library = torch.library.Library("aten", "IMPL")
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::silu_backward", "CUDA"):
        library.impl("silu_backward", _unreachable, "CUDA")
    try:
        yield
    finally:
        library._destroy()


def _unreachable(*_: object) -> torch.Tensor:
    raise AssertionError("the emulation takes every call before torch's own kernels do")


@contextmanager
def fake_cuda(*, compute: bool = True, count: int = 2) -> Iterator[FakeCuda]:
    """Let this process have `count` CUDA devices; with `compute`, they compute floating-point numbers."""
    if torch.cuda.is_available():
        torch.cuda.init()  # before its functions are replaced
    if importlib.util.find_spec("liger_kernel"):  # these look for CUDA's own functions as they are imported
        importlib.import_module("liger_kernel.ops")
    if importlib.util.find_spec("bitsandbytes"):
        import_bitsandbytes()
    _device_constructors()  # caches `torch.tensor` itself, which is about to be replaced
    cuda = FakeCuda(compute=compute, count=count)
    attention, backward = torch.nn.functional.scaled_dot_product_attention, torch.Tensor.backward
    to, tasks = torch.Tensor.to, itertools.count()
    devices: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: count,
        "get_device_name": lambda *_: NAME,
        "get_device_properties": lambda *_: SimpleNamespace(
            name=NAME, total_memory=MEMORY, major=9, minor=0, multi_processor_count=132
        ),
        "current_device": lambda: cuda.current,
        "set_device": lambda device: cuda.exchange_device(cuda.device(device).index),
        "_exchange_device": cuda.exchange_device,
        "_maybe_exchange_device": cuda.exchange_device,
        "Stream": cuda.Stream,
        "current_stream": cuda.stream,
        "set_stream": cuda.set_stream,
        "CUDAGraph": cuda.Graph,
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: cuda.graph is not None,
        "synchronize": lambda device=None: cuda.stream(device).synchronize(),
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (MEMORY, MEMORY),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "get_rng_state": lambda *_: torch.zeros(0, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
    }

    def attend(query, *args, **kwargs):
        return (cuda.attention if isinstance(query, CudaTensor) else attention)(query, *args, **kwargs)

    def differentiate(tensor, *args, **kwargs):
        if not isinstance(tensor, CudaTensor):
            return backward(tensor, *args, **kwargs)
        task = next(tasks)
        with patch.object(torch._C, "_current_graph_task_id", lambda: task):  # gradient checkpointing asks
            return _backward(tensor)

    def move(tensor, *args, **kwargs):  # torch asks the guard for the index
        return to(
            tensor, *map(cuda.with_index, args), **{name: cuda.with_index(value) for name, value in kwargs.items()}
        )

    def then_moved(make):  # torch moves where the mode does not see it
        return lambda *args, device=None, **kwargs: move(make(*args, **kwargs), device=device)

    replaced = [
        (torch._C, "_host_emptyCache", lambda: None),
        (torch.cuda.graph, "default_capture_stream", None),
        (torch.nn.functional, "scaled_dot_product_attention", attend),
        (torch.Tensor, "backward", differentiate),
        (torch.Tensor, "to", move),
        (torch.Tensor, "pin_memory", lambda tensor: cuda.pin(tensor)),
        (torch, "tensor", then_moved(torch.tensor)),
        (torch, "as_tensor", then_moved(torch.as_tensor)),
        (_foreach_utils, "_foreach_supported_types", [torch.Tensor, CudaTensor]),
    ]
    with ExitStack() as stack:
        stack.enter_context(_device_guard())
        stack.enter_context(_own_kernels())
        stack.enter_context(patch.multiple(torch.cuda, **devices))
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value, create=name == "_host_emptyCache"))
        stack.enter_context(cuda)
        yield cuda
