"""The engines, and from options to a sampler: which engine, and why.

Enters: the name of an engine and its settings. Leaves: an open `Sampler`, and which engine was chosen and why.
What an engine needs is imported when it is opened, so that endpoints do without torch and bad input is reported at once.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from rlvr_cli.config.shared.addresses import KEY_ENV, endpoint_key
from rlvr_cli.config.shared.model import ModelOptions
from rlvr_cli.errors import Interrupted, RlvrError, missing_extra
from rlvr_cli.parallel.start import reserve
from rlvr_cli.process import importing
from rlvr_cli.types import Sampler

if TYPE_CHECKING:
    from rlvr_cli.models.policy import Policy
    from rlvr_cli.runs.run_dir import RunDir

UTILIZATION = 0.85  # of a GPU of its own, that vLLM takes by default: the handout's value


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is opened with; each reads its own. The fields have the names of the options (`config.shared`)."""

    model: str  # empty: the built-in model
    dtype: str = "auto"
    device: str = "auto"
    max_batch_size: int | None = None
    cuda_graphs: bool = True
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.0  # 0: `UTILIZATION`
    seed: int = 0
    lora_rank: int = 0
    lora_alpha: int = 32
    base_url: str = ""
    endpoint: str = "completions"
    api_key_env: str = KEY_ENV
    request_timeout: float = 600.0
    endpoint_concurrency: int = 32
    sampler_urls: str = ""  # of vLLM servers, separated by commas
    weights_dir: str = ""
    takes_weights: bool = False  # whether the engine will get those of a trainer
    # Of a sampler in another process, which plays them itself: `config.shared.episodes`.
    episodes: Mapping[str, Any] = field(default_factory=dict)
    sleep_mode: bool = False  # make the engine's `sleep` give the device's memory back

    @property
    def resolved_dtype(self) -> str:
        """The precision; `auto` is bfloat16 on CUDA, else float32."""
        from rlvr_cli.models.compute.device import on_cuda

        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if on_cuda(self.device) else "float32"


def settings_of(config: ModelOptions) -> EngineSettings:
    """Return the settings among the options of a command; a command without an option gets its default."""
    names = [f.name for f in fields(EngineSettings) if hasattr(config, f.name)]
    return EngineSettings(**{name: getattr(config, name) for name in names})


@dataclass(frozen=True)
class EngineKind:
    """An engine: how it opens, and what commands must know about it."""

    title: str
    open: Callable[[EngineSettings], Sampler]  # with its own copy of the weights
    package: str = ""  # that it imports; empty: nothing beside rlvr's own
    extra: str = ""  # of rlvr, with which that is installed
    trains: bool = True  # whether it can load the trainer's weights: --engine of the training commands
    elsewhere: bool = False  # whether it computes on devices of its own, which are not ours to place
    # Sample from the trainer's own model, without a copy of it; None: the engine cannot, and takes memory of its own.
    share: "Callable[[Policy, EngineSettings], Sampler] | None" = None


def _named(function: str) -> Callable[..., Sampler]:
    """Return what calls a `module:function` of this room. The module is imported when it is called."""

    def call(*arguments: Any) -> Sampler:
        where = f"rlvr_cli.samplers.{function}"
        with nullcontext() if where.partition(":")[0] in sys.modules else importing():
            named = resolve_name(where)
        return named(*arguments)

    return call


SERVERS = "vllm-servers"  # the engine of --sampler-urls, which is not a choice of --engine


# The choices of --engine are these names: `Engine` in config/shared/engine.py, and `TrainingEngine` those that train.
ENGINES = {
    "transformers": EngineKind(
        "transformers", _named("embedded.open:open_engine"), share=_named("embedded.open:share")
    ),
    "vllm": EngineKind("vLLM", _named("vllm:open_engine"), package="vllm", extra="vllm"),
    "openai": EngineKind("openai", _named("openai:open_engine"), package="aiohttp", extra="openai", trains=False),
    SERVERS: EngineKind(
        "vLLM servers", _named("parallel.servers:open_engine"), package="aiohttp", extra="openai", elsewhere=True
    ),
}


@dataclass(frozen=True)
class Engine:
    """An engine's name and the reason for taking it."""

    name: str
    reason: str


def choose_engine(
    engine: str, *, base_url: str, api_key_env: str = KEY_ENV, embedded: bool = False, sampler_urls: str = ""
) -> Engine:
    """Resolve `auto`: an endpoint when one is named, vLLM where it is installed with a CUDA device, else transformers.

    Args:
        embedded: `auto` is transformers, because there are several trainers, which sample themselves.
        sampler_urls: --sampler-urls.

    Raises:
        RlvrError: the package of the engine that was asked for is not installed, or the endpoint's key is missing.
    """
    if sampler_urls:
        chosen = Engine(SERVERS, "--sampler-urls names them")
    elif engine != "auto":
        chosen = Engine(engine, "asked for with --engine")
    elif base_url:
        chosen = Engine("openai", "--base-url names an endpoint")
    elif embedded:
        return Engine("transformers", "every trainer samples a share with its own weights")
    else:
        return _automatic()
    kind = engine_kind(chosen.name)
    if kind.package and importlib.util.find_spec(kind.package) is None:
        raise missing_extra(kind.title if kind.package == kind.extra else kind.package, kind.extra)
    if base_url:
        endpoint_key(base_url, api_key_env)
    return chosen


def _automatic() -> Engine:
    if importlib.util.find_spec("vllm") is None:
        return Engine("transformers", "vLLM is not installed")
    import torch

    if not torch.cuda.is_available():
        return Engine("transformers", "no CUDA device; --engine vllm runs vLLM on the CPU")
    return Engine("vllm", "vLLM is installed and there is a CUDA device")


def engine_kind(engine: str) -> EngineKind:
    """Return the engine of this name. Raises RlvrError if there is none."""
    if engine not in ENGINES:
        raise RlvrError(f"There is no engine {engine!r}.", f"Choose one of {', '.join(ENGINES)}.")
    return ENGINES[engine]


def open_sampler(engine: str, settings: EngineSettings, *, devices: Sequence[str] = ()) -> Sampler:
    """Load the model into the engine.

    Args:
        devices: if there are several, that many processes load it, each on its device or at its place on a cluster.

    Raises:
        RlvrError: an unknown engine, a missing extra, an unreadable model, an endpoint without a key.
    """
    kind = engine_kind(engine)
    if len(devices) < 2:
        return kind.open(settings)
    dtype = replace(settings, device=devices[0]).resolved_dtype
    reserve(devices)
    options = asdict(settings) | {"param_dtype": dtype, "compute_dtype": dtype}
    return resolve_name("rlvr_cli.samplers.parallel.processes:SamplingProcesses")(engine, options, devices=devices)


def check_model(engine: str, model: str) -> None:
    """Raise RlvrError if the weights of --model are quantized, and the engine is the embedded one, which cannot load them."""
    from rlvr_cli.models.directory import check_unquantized
    from rlvr_cli.models.identity import model_path

    if engine_kind(engine).share is not None:
        check_unquantized(model_path(model))


@contextmanager
def sampler_recorded(sampler: Sampler, run: "RunDir", *, reason: str) -> Iterator[None]:
    """Store in run.json, before the block and after it, what a sampler is: its engine and why it was chosen, its seeding and its notes.

    What an endpoint does not take shows only as it answers. Of a run that goes on, the earlier notes stay: its rows are theirs.

    Raises:
        RlvrError: run.json cannot be written.
    """

    def record() -> None:
        stored = run.metadata.get("sampler") or {}
        facts = {
            "engine": sampler.engine,
            "reason": reason,
            "seeding": "none" if stored.get("seeding") == "none" else sampler.seeding,
            "notes": [*dict.fromkeys([*stored.get("notes", ()), *sampler.notes])],
        }
        if facts != stored:
            run.update(sampler=facts)

    record()
    try:
        yield
    except (Interrupted, RlvrError):
        with suppress(RlvrError):  # what ended the block is said
            record()
        raise
    record()
