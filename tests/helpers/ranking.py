"""The order of samples in which `best_at_k` takes their rewards."""

from collections.abc import Sequence
from statistics import fmean


def ranked(rewards: Sequence[float], scores: Sequence[float]) -> list[float]:
    """The rewards in the order of the scores, the highest first; those whose scores are equal have their mean."""
    mean = {score: fmean(r for r, s in zip(rewards, scores, strict=True) if s == score) for score in scores}
    return [mean[score] for score in sorted(scores, reverse=True)]
