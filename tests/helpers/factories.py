"""Rows and runs for tests: the only place in the tests that lists all columns of a rollout, of a grade and of a segment.

All tests can import it (`pythonpath` in pyproject.toml): ``from factories import a_rollout``.
"""

from datetime import datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Candidate, Completion, Episode, Regrade, Rollout, Segment, Turn, TurnFacts

_ROLLOUT = {
    "run_id": "r",
    "phase": "eval",
    "step": 0,
    "policy_version": 0,
    "example_id": "q0",
    "sample_index": 0,
    "prompt": "3 + 4?",
    "response": "</think> <answer> 7 </answer>",
    "ground_truth": "7",
    "prompt_ids": (1,),
    "response_ids": (2,),
    "sampled_logprobs": (-1.0,),
    "finish_reason": "stop",
    "stop_reason": None,
    "num_prompt_tokens": 1,
    "num_response_tokens": 1,
    "grader": "r1_zero",
    "format_reward": 1.0,
    "answer_reward": 1.0,
    "reward": 1.0,
    "grade_error": None,
    "extracted_answer": "7",
    "category": "format_1_answer_1",
    "failure_kind": None,
    "advantage": None,
    "mean_logprob": -1.0,
    "mean_entropy": None,
    "seed": 1,
    "sampled_at": datetime(2026, 1, 2),
}
_EPISODE = Episode(
    num_turns=2, num_policy_tokens=1, ended_by="policy", tool_calls=1, tool_errors=0, forged=0, environment_seconds=0.5,
    turn_rewards=None, graded_from=0, graded_to=0,
)  # fmt: skip
_COMPLETION = {
    "request_index": 0,
    "sample_index": 0,
    "text": "</think> <answer> 7 </answer>",
    "prompt_ids": (1,),
    "token_ids": (2, 3),
    "logprobs": (-0.5, -0.5),
    "num_prompt_tokens": 1,
    "num_tokens": 2,
    "finish_reason": "stop",
    "stop_reason": "</answer>",
    "mean_entropy": 0.25,
}
_GRADE = {
    "run_id": "r",
    "phase": "eval",
    "step": 0,
    "example_id": "q0",
    "sample_index": 0,
    "grader": "math_verify",
    "attempt": 0,
    "grader_sha256": None,
    "format_reward": 1.0,
    "answer_reward": 0.0,
    "reward": 0.0,
    "grade_error": None,
    "extracted_answer": "8",
    "category": "format_1_answer_0",
    "failure_kind": "wrong_answer",
}
_SEGMENT = {
    "run_id": "r",
    "phase": "train",
    "step": 0,
    "policy_version": 0,
    "example_id": "q0",
    "sample_index": 0,
    "start": 0,
    "response": "3",
    "prompt_ids": (1,),
    "response_ids": (2,),
    "sampled_logprobs": (-1.0,),
    "finish_reason": None,
    "stop_reason": None,
    "mean_entropy": None,
    "seed": 1,
    "sampled_at": datetime(2026, 1, 2),
}


_CANDIDATE: dict[str, Any] = {
    "number": 0, "parents": (), "island": 0, "proposer": "replay", "program": "points = []", "program_sha256": "p",
    "num_points": 0, "points_sha256": "s", "error": None, "same_as": None, "status": "ok", "seconds": 0.5, "layers": (),
}  # fmt: skip


def a_completion(**changes: Any) -> Completion:
    """A sampler's answer to its first request, with these fields changed."""
    return Completion(**_COMPLETION | changes)


def a_rollout(**changes: Any) -> Rollout:
    """Return an evaluation rollout with a correct answer, with the given fields changed."""
    return Rollout(**{**_ROLLOUT, **changes})


def an_episode(*lengths: int, turn_rewards: tuple[float | None, ...] | None = None, **changes: Any) -> Rollout:
    """Return an episode of these numbers of tokens, in turn of the policy and of an environment; the ids count from 2.

    Args:
        turn_rewards: of the environment, which then gave the reward, their sum.
    """
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    roles = ["environment" if i % 2 else "policy" for i in range(len(lengths))]
    turns = tuple(Turn(role, end - n, end) for role, end, n in zip(roles, ends, lengths, strict=True))
    mask = tuple(role == "policy" for role, n in zip(roles, lengths, strict=True) for _ in range(n))
    num_turns = roles.count("policy")
    episode = Episode(num_turns, sum(mask), "policy", num_turns - 1, 0, 0, 0.0, turn_rewards, 0, 1)
    given = {} if turn_rewards is None else {"reward": sum(r or 0.0 for r in turn_rewards), "grader": "environment"}
    own = {
        "response_ids": tuple(range(2, 2 + len(mask))),
        "sampled_logprobs": tuple(-1.0 if own else 0.0 for own in mask),
        "num_response_tokens": len(mask),
        "response_mask": mask if len(turns) > 1 else None,
        "turns": turns if len(turns) > 1 else None,
        "episode": episode,
    }
    return a_rollout(**{**own, **given, **changes})


def a_conversation(
    *said: tuple[str, str], failed_turns: tuple[int, ...] = (), forged_turns: tuple[int, ...] = (), **changes: Any
) -> dict[str, Any]:
    """Return fields of a rollout for an episode in which each role said a text, whose bytes are its tokens.

    Args:
        failed_turns, forged_turns: of the `TurnFacts`.
        changes: of the `Episode`.
    """
    texts = [text for _, text in said]
    tokens = list(accumulate((len(text.encode()) for text in texts), initial=0))
    ids = tuple("".join(texts).encode())
    mask = tuple(role == "policy" for role, text in said for _ in text.encode())
    own = sum(role == "policy" for role, _ in said)
    ends = tuple(accumulate(map(len, texts)))
    last = max(place for place, (role, _) in enumerate(said) if role == "policy")
    episode = _EPISODE._replace(
        num_turns=own,
        num_policy_tokens=sum(mask),
        tool_calls=len(said) - own,
        graded_from=ends[last] - len(texts[last]),
        graded_to=ends[last],
    )
    return {
        "response": "".join(texts), "response_ids": ids, "num_response_tokens": len(ids), "response_mask": mask,
        "sampled_logprobs": tuple(-0.5 * own for own in mask), "episode": episode._replace(**changes),
        "turns": tuple(Turn(role, *place) for (role, _), place in zip(said, pairwise(tokens), strict=True)),
        "turn_facts": TurnFacts(ends, failed_turns, forged_turns),
    }  # fmt: skip


def a_candidate(**changes: Any) -> Candidate:
    """Return the first attempt of a search, a valid one, with the given fields changed."""
    return Candidate(**{**_CANDIDATE, **changes})


def a_grade(**changes: Any) -> Regrade:
    """Return another grader's verdict on that rollout: a wrong answer."""
    return Regrade(**{**_GRADE, **changes})


def a_segment(**changes: Any) -> Segment:
    """Return the first token of a training response that goes on, with the given fields changed."""
    return Segment(**{**_SEGMENT, **changes})


def expert_iterations(folder: Path, starts: dict[str, list[int]]) -> None:
    """Make runs of expert iteration, by name: the updates at which their rounds begin, and their end, each with an evaluation."""
    for seed, (name, begins) in enumerate(starts.items()):
        with RunDir.create(folder, "ei", name=name, metadata={}) as run:
            for step in range(begins[-1]):
                sampled = {"reward/samples": 8.0, "reward/mean": seed + step / 100} if step in begins else {}
                run.commit_metrics(step, "train", {"update/rows": 4.0, "policy/entropy": 1.0 + seed, **sampled})
            for step in begins:
                run.commit_metrics(step, "eval", {"reward/mean": (seed + 1) / 4})
                rows = [
                    a_rollout(run_id=name, step=step, example_id=f"q{q}", reward=float(q <= seed)) for q in range(4)
                ]
                run.commit_rollouts("eval", step, rows)
