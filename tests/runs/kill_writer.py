"""The program that the kill tests kill: it writes a run and acknowledges each commit that returned.

Enters, on stdin: one JSON object per line, {"run": directory, "steps": n or null, "fault": RLVR_FAULT or null}. For
each a child is forked, with pyarrow already imported, so that it spends its time writing. Leaves, on stdout: "pid N",
then "ack PHASE STEP PART" and "ack metrics STEP" from the child, then "dead STATUS" (negative: the signal's number).

The content of a part is a function of (phase, step, part), so the tests can detect a lost, duplicate or altered row.
"""

import json
import os
import sys
import traceback
from pathlib import Path

from factories import a_rollout
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Phase, Rollout

PARTS: tuple[tuple[Phase, int], ...] = (("train", 0), ("train", 1), ("eval", 0))


def rollouts_of(run_id: str, *, phase: Phase, step: int, part: int) -> list[Rollout]:
    """Return the 1 to 23 rows of one part, each with up to 4 KB of text."""
    count = 1 + (7 * step + 5 * part + len(phase)) % 23
    return [_rollout(run_id, phase=phase, step=step, index=100 * part + i) for i in range(count)]


def _rollout(run_id: str, *, phase: Phase, step: int, index: int) -> Rollout:
    tokens = tuple(range(index % 17))
    return a_rollout(
        run_id=run_id,
        phase=phase,
        step=step,
        policy_version=step,
        example_id=f"q{index % 3}",
        sample_index=index,
        response=f"{phase} {step} {index} " * (1 + (31 * step + index) % 250),
        prompt_ids=(1, 2, 3),
        response_ids=tokens,
        sampled_logprobs=tuple(-t / 4 for t in tokens),
        num_prompt_tokens=3,
        num_response_tokens=len(tokens),
        answer_reward=float(index % 2),
        reward=float(index % 2),
        category=f"format_1_answer_{index % 2}",
        seed=index,
    )


def write(path: Path, *, steps: int | None) -> None:
    """Create or resume the run, and write the rows that each step lacks."""
    begun = (path / "run.json").exists()
    with RunDir.resume(path) if begun else RunDir.create(path.parent, "grpo", name=path.name, metadata={}) as run:
        step = max((s for _, s, _, _ in run.committed_keys()), default=0)  # the last one may be incomplete
        while steps is None or step < steps:
            for phase, part in PARTS:
                rollouts = rollouts_of(run.id, phase=phase, step=step, part=part)
                keys = {(phase, step, r.example_id, r.sample_index) for r in rollouts}
                if not keys & run.committed_keys(phase, step):
                    run.commit_rollouts(phase, step, rollouts)
                    _say(f"ack {phase} {step} {part}")
            run.commit_metrics(step, "train", {"reward/mean": step / 2, "loss": float("nan")})
            _say(f"ack metrics {step}")
            step += 1


def _say(line: str) -> None:
    os.write(1, line.encode() + b"\n")  # one write, so that lines of two processes do not mix


def main() -> None:
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401

    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if order["fault"]:
                    os.environ["RLVR_FAULT"] = order["fault"]
                write(Path(order["run"]), steps=order["steps"])
                status = 0
            finally:
                if status:
                    traceback.print_exc()
                os._exit(status)
        _say(f"pid {child}")
        _say(f"dead {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")


if __name__ == "__main__":
    main()
