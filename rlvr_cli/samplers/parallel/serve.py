"""The child process of a `samplers.parallel.process.SamplingProcess`, which starts it: `python -m rlvr_cli.samplers.parallel.serve`.

What takes long to import is imported in functions: before that, `main` sees to it that the process dies with its parent.
"""

import signal
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from rlvr_cli.process import STOP_SIGNALS, die_with_parent

if TYPE_CHECKING:
    from rlvr_cli.models.policy import Policy
    from rlvr_cli.types import Sampler


def open_engine(
    engine: str, *, param_dtype: str, compute_dtype: str, **settings: Any
) -> "tuple[Sampler, Callable[[], Policy]]":
    """Open an engine with its own copy of the weights, and return what gives the policy through which it receives new ones.

    The policy has an adapter if the parent trains one, and receives only that. An engine that does not share its model loads
    it when the first weights arrive.

    Args:
        param_dtype: of the policy's weights, as the parent sends them.
        compute_dtype: of an engine that shares the policy's model.
        settings: the fields of `EngineSettings`. Its `device` is for an engine that shares the policy's model; others use
            the first visible one.

    Raises:
        RlvrError: the engine cannot take a trainer's weights.
    """
    from dataclasses import replace

    from rlvr_cli.errors import RlvrError
    from rlvr_cli.models.identity import model_path
    from rlvr_cli.models.load import load_policy, use_few_threads
    from rlvr_cli.models.policy import trained_adapter
    from rlvr_cli.samplers.open import EngineSettings, engine_kind

    kind, opened_with = engine_kind(engine), EngineSettings(**settings)
    lora = trained_adapter(opened_with)
    if not kind.trains:
        raise RlvrError(f"{kind.title} cannot load the trainer's weights.", "Choose another --engine.")
    path = model_path(opened_with.model)
    if kind.share is None:
        sampler = kind.open(replace(opened_with, device="auto"))
        return sampler, cache(lambda: load_policy(path, dtype=param_dtype, device="cpu", lora=lora))
    policy = load_policy(path, dtype=param_dtype, compute_dtype=compute_dtype, device=opened_with.device, lora=lora)
    use_few_threads(policy)
    return kind.share(policy, opened_with), lambda: policy


def main(connection: int, weights: int, parent: int) -> None:
    """Run a sampling process: open the engine that the parent names, and serve it.

    Args:
        connection, weights: descriptors of the connection to the parent, and of the memory with new weights.
        parent: the parent's process id.
    """
    for number in STOP_SIGNALS:  # the parent handles them
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)

    from multiprocessing.connection import Connection

    from rlvr_cli.samplers.parallel.process import SharedTensors, serve

    serve(Connection(connection), SharedTensors(weights), open_engine)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
