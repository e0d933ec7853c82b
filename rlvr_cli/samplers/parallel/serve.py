"""The child's end of a `process.SamplingProcess`: the engine, which answers requests and loads weights until the parent is gone.

Enters: messages of the parent. Leaves: completions, and log-probabilities that show which weights are served.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch

from rlvr_cli.config.shared.episodes import EpisodeOptions
from rlvr_cli.errors import RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.models.identity import model_path
from rlvr_cli.models.load import load_policy, use_few_threads
from rlvr_cli.models.policy import Policy, trained_adapter
from rlvr_cli.models.pretrained import load_tokenizer
from rlvr_cli.parallel.shared_tensors import SharedTensors
from rlvr_cli.parallel.worker import read, write
from rlvr_cli.samplers.episodes.open import open_environment, played
from rlvr_cli.samplers.open import EngineSettings, engine_kind
from rlvr_cli.samplers.parallel.process import sizes_of, with_tuples
from rlvr_cli.samplers.weight_check import fixed_logprobs
from rlvr_cli.types import Completion, Example, Request, Sampler, SamplingParams

_FIELDS = [field.name for field in fields(Completion)]  # `asdict` would copy each of its tokens


def serve(connection: Connection, *, weights: int, engine: str, **engine_options: Any) -> None:
    """Open an engine, and serve it until the parent is gone.

    Args:
        weights: the descriptor of the memory in which the parent writes new weights.
        engine, engine_options: of `open_engine`.
    """
    channel, shared = _Channel(connection), SharedTensors(weights)
    try:
        sampler, policy_of = open_engine(engine, **engine_options)
        with playing(sampler, **engine_options) as sampler:
            facts = {"notes": list(sampler.notes), "seeding": sampler.seeding}
            channel.answers.put(["ready", facts | {"context_length": getattr(sampler, "context_length", None)}])
            while True:
                _answer(channel, shared, sampler, policy_of)
    except RlvrError as error:
        channel.answers.put(["error", [error.problem, error.hint]])
        with suppress(EOFError):
            while True:  # until the parent has read the error and closes its end
                channel.receive()
    except EOFError:
        pass


class _Channel:
    """Both directions of the connection, each with its own thread and queue.

    Answers queue here while the parent trains and does not read, so the engine never blocks; requests queue here while
    the engine samples and does not read, so the parent never blocks.
    """

    def __init__(self, connection: Connection) -> None:
        self.answers: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self.canceled_through = 0  # jobs up to this number are canceled
        self._connection = connection
        self._inbox: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        for work in (self._receive_all, self._send_all):
            threading.Thread(target=work, daemon=True).start()

    def receive(self) -> list[Any]:
        """Return the next message. Raises EOFError when the parent is gone."""
        message = self._inbox.get()
        if message is None:
            raise EOFError
        return message

    def _receive_all(self) -> None:
        with suppress(EOFError, ConnectionError):
            while True:
                match read(self._connection):
                    case "drop", number:  # takes effect at once, not in its turn
                        self.canceled_through = number
                    case message:
                        self._inbox.put(message)
        self._inbox.put(None)

    def _send_all(self) -> None:
        with suppress(OSError):  # the parent is gone; the other thread sees it too
            while True:
                write(self._connection, self.answers.get())


def _answer(channel: _Channel, shared: SharedTensors, sampler: Sampler, policy_of: Callable[[], Policy]) -> None:
    match channel.receive():
        case "sample", number, requests, params:
            started = time.perf_counter()
            asked = [_request(request) for request in requests]
            completions = sampler.sample(asked, SamplingParams(**with_tuples(params)))
            while number > channel.canceled_through and (completion := next(completions, None)):
                channel.answers.put(["completion", {name: getattr(completion, name) for name in _FIELDS}])
                fault_point("completion")
            completions.close()
            channel.answers.put(["done", time.perf_counter() - started])
        case "load", version, sizes:
            fault_point("load")
            policy = policy_of()
            weights = policy.weights_for_process()
            if sizes_of(weights) != sizes:
                raise RlvrError("The policy's weights do not fit the model in the sampling process.")
            with torch.no_grad():
                shared.read(weights)
            sampler.load_weights(policy, version)
            channel.answers.put(["loaded", fixed_logprobs(policy)])


def _request(fields: dict[str, Any]) -> Request:
    example = Example(**fields["example"]) if fields["example"] is not None else None
    return replace(Request(**with_tuples({**fields, "example": None})), example=example)


@contextmanager
def playing(
    sampler: Sampler,
    *,
    model: str,
    episodes: Mapping[str, Any] | None = None,
    takes_weights: bool = False,
    **others: Any,
) -> Iterator[Sampler]:
    """Let the sampler play episodes, if there is an environment, in processes that end with the block."""
    if not episodes:
        yield sampler
        return
    config = EpisodeOptions(**with_tuples({**episodes}))
    with open_environment(config, quiet=True) as pool:
        yield played(sampler, config, load_tokenizer(model_path(model)), pool, trains=takes_weights)


def open_engine(
    engine: str, *, param_dtype: str, compute_dtype: str, **settings: Any
) -> tuple[Sampler, Callable[[], Policy]]:
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
