"""The child process of a `samplers.process.SamplingProcess`, which starts it: `python -m rlvr_cli.samplers.serve`."""

import signal
import sys
from typing import TYPE_CHECKING

from rlvr_cli.models.device import use_few_threads
from rlvr_cli.models.identity import model_path
from rlvr_cli.process import die_with_parent
from rlvr_cli.samplers.open import open_sampler
from rlvr_cli.types import Sampler

if TYPE_CHECKING:
    from rlvr_cli.models.policy import Policy


def open_engine(
    engine: str,
    model: str,
    *,
    dtype: str,
    param_dtype: str,
    device: str,
    max_batch_size: int | None,
    cuda_graphs: bool,
    max_model_len: int | None,
    gpu_memory_utilization: float,
    seed: int,
) -> "tuple[Sampler, Policy]":
    """Open an engine with its own copy of the weights, and the policy through which it receives new ones.

    Args:
        param_dtype: of the policy's weights, as the parent sends them.
        device: for the embedded engine; vLLM uses the first visible one.
    """
    from rlvr_cli.models.policy import load_policy

    if engine == "vllm":
        sampler = open_sampler(
            engine,
            model,
            dtype=dtype,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
            seed=seed,
        )
        return sampler, load_policy(model_path(model), dtype=param_dtype, device="cpu")
    from rlvr_cli.samplers.embedded.engine import TransformersSampler

    policy = load_policy(model_path(model), dtype=param_dtype, device=device)
    use_few_threads(policy)
    how = {"max_batch_size": max_batch_size, "cuda_graphs": cuda_graphs, "autocast_dtype": policy.autocast_dtype}
    return TransformersSampler(policy, **how), policy


def main(descriptor: int, parent: int) -> None:
    """Run a sampling process: open the engine that the parent names, and serve it."""
    from multiprocessing.connection import Connection

    from rlvr_cli.samplers.process import serve

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles both signals
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(parent)
    serve(Connection(descriptor), open_engine)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
