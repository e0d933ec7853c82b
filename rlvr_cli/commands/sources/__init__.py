"""Sources of rollouts: where the loop of a training command gets its next batch, which does not know the source it has.

Enters: the options, and how the command samples (`sampling.Sampling`). Leaves: the source that the options ask for.
"""

from rlvr_cli.commands.sources.ahead import Ahead
from rlvr_cli.commands.sources.dynamic import DynamicSampling
from rlvr_cli.commands.sources.partial import PartialRollouts
from rlvr_cli.commands.sources.plain import Plain
from rlvr_cli.commands.sources.sampling import Sampling
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.training.loop import RolloutSource


def choose_source(config: GrpoConfig, sampling: Sampling) -> RolloutSource:
    """Return the source that the options ask for."""
    if config.partial_rollout_tokens:
        return PartialRollouts(sampling, tokens=config.partial_rollout_tokens, num_steps=config.n_grpo_steps)
    source: RolloutSource = Plain(sampling)
    if config.dynamic_sampling:
        source = DynamicSampling(sampling, max_rounds=config.max_sampling_rounds, by_turn=config.credit == "turn")
    return Ahead(source, sampling) if config.async_steps else source
