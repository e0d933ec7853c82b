"""rlvr: reinforcement learning from verifiable rewards, with every rollout in Parquet."""

__version__ = "0.1.0"
