"""Environments: what answers the policy in an episode of several turns, such as a tool or a game.

Enters: the example of an episode, its seed, and the policy's turns. Leaves: a `Reply` to each of them. Importing this package is
cheap; an environment runs in a process of `pool.EnvironmentPool`.
"""

from rlvr_cli.environments.interface import Environment, Reply

__all__ = ["Environment", "Reply"]
