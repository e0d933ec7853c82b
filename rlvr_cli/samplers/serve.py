"""The other end of a `samplers.process.SamplingProcess`: `python -m rlvr_cli.samplers.serve`, started by it and by nothing else."""

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


def open_apart(
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
    """An engine with weights of its own, for a `SamplingProcess`, and the policy through which it is given others.

    Args:
        param_dtype: of the policy's weights, as they come.
        device: of the embedded engine; vLLM takes the first that it sees.
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
    """A sampling process: open the engine that the parent names, and serve it."""
    from multiprocessing.connection import Connection

    from rlvr_cli.samplers.process import serve

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # both are the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(parent)
    serve(Connection(descriptor), open_apart)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
