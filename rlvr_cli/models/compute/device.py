"""Where and in which precision a model computes."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.compute import onednn
from rlvr_cli.text import printable

# Parameters of the smallest model that is trained in bfloat16 without being asked, by a CPU that multiplies it. A step then takes 0.74
# of the CPU seconds of float32; 0.59 with 25M parameters, 0.84 to 0.88 with 0.4M (`benchmarks/bfloat16.py`).
_LEAST_IN_BFLOAT16 = 1_000_000


def cuda_devices() -> dict[str, int]:
    """Return the bytes of memory of each visible CUDA device, by its name: cuda:0, cuda:1, ..."""
    return {f"cuda:{i}": torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())}


def nvidia_devices() -> list[str]:
    """Return what the NVIDIA driver lists, without torch: a line of `nvidia-smi -L` per device, else the device files."""
    import subprocess

    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, errors="replace", timeout=30)
        if lines := [line.partition(" (UUID")[0] for line in listed.stdout.splitlines() if line.startswith("GPU ")]:
            return lines
    return sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))


def cuda_error() -> str:
    """Return why torch cannot use a CUDA device, on one line; empty if it can."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # the first for a build without CUDA
        return str(error).splitlines()[0]
    return ""


def describe_cuda(device: str) -> str:
    """Return a CUDA device's name, memory, compute capability, and whether it computes in bfloat16 without emulation."""
    found = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    with torch.cuda.device(device):
        bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return (
        f"{found.name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, compute capability {found.major}.{found.minor}, "
        f"{'bfloat16' if bfloat16 else 'no bfloat16: it is emulated, and slow'}"
    )


def on_cuda(device: str) -> bool:
    """Return whether `device`, which may be `auto`, is a CUDA device."""
    import torch

    return torch.cuda.is_available() if device == "auto" else device.startswith("cuda")


def faster_in_bfloat16(parameters: int) -> bool:
    """Return whether this CPU computes a model of so many float32 weights in less time in bfloat16.

    It does if it multiplies bfloat16 itself, by AVX512_BF16 or AMX (else oneDNN converts each operand), and the model is large enough.
    """
    multiplies = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return multiplies and torch.backends.mkldnn.is_available() and parameters >= _LEAST_IN_BFLOAT16


def resolve_compute_dtype(name: str, *, weights: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the precision of matrix products. `auto`: bfloat16 for float32 weights on CUDA, else that of the weights.

    Raises:
        RlvrError: another precision than that of the weights, and not bfloat16 for float32 weights.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and weights == torch.float32 else weights
    allowed = [torch.float32, torch.bfloat16] if weights == torch.float32 else [weights]
    for dtype in allowed:
        if dtype_name(dtype) == name:
            return dtype
    raise RlvrError(
        f"Weights in {dtype_name(weights)} do not compute in {printable(name)!r}.",
        f"Choose one of auto, {', '.join(map(dtype_name, allowed))}.",
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a precision as options have it, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def operand_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the precision of matrix products with this tensor here: that of autocast if it is on, else its own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def as_operand(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round a tensor to `dtype`, for `product`.

    A CPU has no half-precision product with a float32 result, so that float32 holds the rounded numbers there.
    """
    rounded = tensor.to(dtype)
    return rounded.float() if dtype.itemsize < 4 and not rounded.is_cuda else rounded


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of two results of `as_operand`, not rounded to half precision: near 20, bfloat16 logits are 0.125 apart."""
    if a.dtype.itemsize < 4:
        return torch.mm(a, b, out_dtype=torch.float32)  # type: ignore[call-overload]  (its stubs lack out_dtype)
    return onednn.product(a, b)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add `product(a, b)` to a tensor that is at least float32. For operands in half precision there is no other tensor of its size."""
    if a.dtype.itemsize < 4:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)  # type: ignore[call-overload]  (its stubs lack out_dtype)
    else:
        onednn.add_product(total, a, b)


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|mps|cuda(:[0-9]{1,2})?", name) is None:  # others, such as meta, cannot run a model
        raise RlvrError(f"No device {printable(name)!r}.", "Use auto, cpu, cuda, cuda:1 or mps.")
    device = torch.device(name)
    visible = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= visible:
        raise RlvrError(
            f"There is no device {device}: {visible} CUDA {'device is' if visible == 1 else 'devices are'} visible.",
            "Leave --device out (with one GPU, trainer and engine take turns), or use --device cuda:0."
            if visible
            else "Use --device cpu, or look at CUDA_VISIBLE_DEVICES and whether this PyTorch was built for CUDA.",
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise RlvrError("There is no device mps: this PyTorch sees no Apple GPU.", "Use --device cpu.")
    return device


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to a device. On CUDA the host does not wait: only copies of pinned memory let it go on."""
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the CPU, for which the host waits once for each of their CUDA devices."""
    copies = [tensor.to("cpu", non_blocking=tensor.is_cuda) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a CUDA device is the current one, on which streams, graphs and some kernels run.

    Only while computing: another engine in this process may compute on another device.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def out_of_memory_as_user_error(
    problem: str = "The device has too little memory for this micro-batch.",
    hint: str = "Use smaller micro-batches, which give the same result: --micro-batch-tokens with fewer tokens than the "
    "plan says. If vLLM shares the device, lower --gpu-memory-utilization.",
) -> Iterator[None]:
    """Turn an out-of-memory error of the device into a user error, by default that of an update or of scoring."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RlvrError(problem, hint) from error
