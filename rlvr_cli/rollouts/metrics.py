"""Averages over rollouts, and the cost of sampling and judging them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

from rlvr_cli.types import Rollout

AVERAGED = (
    "reward",
    "format_reward",
    "answer_reward",
    "num_response_tokens",
    "finish_reason",
    "mean_entropy",
    "episode",
    "judgement",
)


@dataclass(frozen=True)
class SamplingStats:
    """The tokens that the policy sampled, and the seconds spent on collecting rollouts."""

    tokens: int = 0
    sampling_seconds: float = 0.0  # work of the engine
    waiting_seconds: float = 0.0  # waiting for the engine; less than its work if it had prefetched
    grading_seconds: float = 0.0  # waiting for the graders; grading that overlaps with sampling is not counted

    def __sub__(self, other: "SamplingStats") -> "SamplingStats":
        return SamplingStats(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def cost(self) -> dict[str, float]:
        """The numbers by field, as `RunDir.commit_rollouts` stores them."""
        return asdict(self)

    @classmethod
    def of_cost(cls, cost: Mapping[str, float]) -> "SamplingStats":
        """The stats that were stored as `cost`; zeros where nothing was."""
        tokens, *seconds = (cost.get(field.name, 0.0) for field in fields(cls))
        return cls(round(tokens), *seconds)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics by name; empty if nothing was sampled."""
        if not self.tokens:
            return {}
        return {
            "sampling/tokens": float(self.tokens),
            "sampling/seconds": self.sampling_seconds,
            "sampling/waiting_seconds": self.waiting_seconds,
            "sampling/tokens_per_second": self.tokens / max(self.sampling_seconds, 1e-9),
            "grading/seconds": self.grading_seconds,
        }


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Compute `generation_metrics` of rollouts."""
    return generation_metrics(
        {name: getattr(r, name) for name in AVERAGED}
        | {"episode": r.episode and r.episode._asdict(), "judgement": r.judgement and r.judgement._asdict()}
        for r in rollouts
    )


def generation_metrics(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Compute averages over rollout rows; a failed grade counts as reward 0, and in `reward/grade_errors`.

    A mean over no value is absent: `reward/format` and `reward/answer` of a grader that gives nothing but the reward.

    Args:
        rows: by column, at least the columns `AVERAGED`.
    """
    totals: dict[str, tuple[float, int]] = {}
    judged: dict[str, float] = {}
    samples = errors = 0
    for row in rows:
        reward, episode = row["reward"] or 0.0, row["episode"]
        for name, value in judge_price(row).items():
            judged[name] = judged.get(name, 0.0) + value
        tokens = row["num_response_tokens"] if episode is None else episode["num_policy_tokens"]
        samples, errors = samples + 1, errors + (row["reward"] is None)
        values = {
            "reward/mean": reward,
            "reward/format": 0.0 if row["reward"] is None else row["format_reward"],
            "reward/answer": 0.0 if row["reward"] is None else row["answer_reward"],
            "length/mean": tokens,
            "length/correct": tokens if reward > 0.5 else None,
            "length/wrong": tokens if reward <= 0.5 else None,
            "length/truncated_share": row["finish_reason"] == "length",
            "entropy/mean": row["mean_entropy"],
        }
        for name, value in (values | episode_values(row)).items():
            total, count = totals.get(name, (0.0, 0))
            totals[name] = (total, count) if value is None else (total + value, count + 1)
    means = {name: total / count for name, (total, count) in totals.items() if count}
    return means | {"reward/samples": float(samples), "reward/grade_errors": float(errors)} | judged


def judge_price(row: Mapping[str, Any]) -> dict[str, float]:
    """What the judge of a row cost: to be summed. Empty of a row without a judge's reply."""
    judgement = row["judgement"]
    if judgement is None:
        return {}
    paid = not judgement["cached"]
    return {
        "judge/asked": float(paid),
        "judge/cached": float(not paid),
        "judge/prompt_tokens": float(paid * judgement["prompt_tokens"]),
        "judge/reply_tokens": float(paid * judgement["reply_tokens"]),
    }


def episode_values(row: Mapping[str, Any]) -> dict[str, float]:
    """What is averaged of an episode besides; its policy's tokens are the length. Empty of another row."""
    episode = row["episode"]
    if episode is None:
        return {}
    said = row["num_response_tokens"] - episode["num_policy_tokens"]
    return {
        "episodes/turns": episode["num_turns"],
        "episodes/tool_calls": episode["tool_calls"],
        "episodes/tool_errors": episode["tool_errors"],
        "episodes/forged": episode["forged"],
        "episodes/environment_share": said / max(row["num_response_tokens"], 1),
        "episodes/environment_seconds": episode["environment_seconds"],
    }


def progress_signals(rollouts: Sequence[Rollout]) -> dict[str, float]:
    return {
        "reward": mean_or_none(r.reward or 0.0 for r in rollouts) or 0.0,
        "truncated": mean_or_none(r.finish_reason == "length" for r in rollouts) or 0.0,
        "tokens": float(sum(r.num_policy_tokens for r in rollouts)),
    }


def mean_or_none(values: Iterable[float]) -> float | None:
    items = [float(v) for v in values]
    return sum(items) / len(items) if items else None
