"""The embedded engine, opened with its settings: on a model of its own, or on the trainer's."""

from rlvr_cli.models.identity import model_path
from rlvr_cli.models.load import load_policy, use_few_threads
from rlvr_cli.models.policy import Policy
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.samplers.open import EngineSettings
from rlvr_cli.types import Sampler


def open_engine(settings: EngineSettings) -> Sampler:
    """Load the model, and open the engine on it."""
    dtype = settings.resolved_dtype
    policy = load_policy(model_path(settings.model), dtype=dtype, compute_dtype=dtype, device=settings.device)
    use_few_threads(policy)
    return share(policy, settings)


def share(policy: Policy, settings: EngineSettings) -> Sampler:
    """Open the engine on the trainer's own model."""
    return TransformersSampler(
        policy,
        max_batch_size=settings.max_batch_size,
        cuda_graphs=settings.cuda_graphs,
        sleep_mode=settings.sleep_mode,
    )
