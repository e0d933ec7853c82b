"""What turns cost: 256 episodes of 1, 2, 4 and 8 turns in which the policy samples the same number of tokens, and a slow tool.

    python benchmarks/episodes.py [--repeats 5] [--json FILE]

The random model of `sampling.py`, 64 questions x 4 episodes, 64 tokens of the policy in each: a turn ends at its last token, since
any letter is a stop string there. The environment answers each turn but the last with one token, or with about 10, which cost what
those of a prompt do. Then 4 turns with a tool that takes 0.5 s in a tenth of the turns: of 256 episodes, which all sample from the
start, and of 2,048, timed as a whole and while others wait to be sampled: from the end of the 256th until 256 are left, which is the
same number of episodes whether they end together or not. The ways take turns within a repeat, those of 256 episodes three times; prints
the medians and their ratio to one turn, and of 2,048 episodes to those whose tool is fast.
"""

import argparse
import os
import statistics
import string
import tempfile
import time
from contextlib import closing
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rlvr_cli.process import importing

with importing():  # as the commands do
    import torch
    from rows import Row, write
    from sampling import random_model, word_problems

    from rlvr_cli.environments.open import EnvironmentSpec
    from rlvr_cli.environments.pool import EnvironmentPool
    from rlvr_cli.models.load import load_policy
    from rlvr_cli.samplers.embedded.engine import TransformersSampler
    from rlvr_cli.samplers.episodes.sampler import EpisodeSampler
    from rlvr_cli.types import Example, Request, SamplingParams

POLICY_TOKENS, QUESTIONS, SAMPLES = 64, 64, 4
ONE, BARE = "1 turns, a token each", "no environment"
SLOW = "the same, a tool of 0.5 s in a tenth of the turns"
WORK, SLOW_WORK = "2,048 episodes, 4 turns, 10 tokens each", "2,048 episodes, that tool, of those without"
BUSY_WORK, BUSY_SLOW_WORK = f"{WORK}, while others wait", f"{SLOW_WORK}, while others wait"
WHILE_OTHERS_WAIT = {WORK: BUSY_WORK, SLOW_WORK: BUSY_SLOW_WORK}
MORE = 8  # times as many episodes, so that there is other work while a tool is slow
ANSWERS = f"""
import random, time
from rlvr_cli.environments import Reply

class Answers:
    stop = tuple({string.printable + chr(0xFFFD)!r})

    text = "<out>3901</out>"

    def begin(self, example, seed):
        self.left, self.random = int(example.ground_truth) - 1, random.Random(seed)

    def answer(self, turn):
        self.left -= 1
        return Reply(self.text, role="tool", done=self.left < 0)

class Short(Answers):
    text = "7"

class Slow(Answers):
    def answer(self, turn):
        if self.random.random() < 0.1:
            time.sleep(0.5)
        return super().answer(turn)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=64, help="processes of the slow tool")
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    every = word_problems(MORE * QUESTIONS)
    with tempfile.TemporaryDirectory() as folder:
        random_model(folder, every[:QUESTIONS])
        policy = load_policy(folder, dtype="float32", device="cpu")
        file = Path(folder, "mine.py")
        file.write_text(ANSWERS)
        engine = TransformersSampler(policy)
        short = EnvironmentPool(EnvironmentSpec(f"{file}:Short"), workers=2)
        quick = EnvironmentPool(EnvironmentSpec(f"{file}:Answers"), workers=2)
        slow = EnvironmentPool(EnvironmentSpec(f"{file}:Slow"), workers=arguments.workers)

        def play(turns: int, pool: EnvironmentPool | None, questions: list[str]) -> tuple[float, float]:
            """Return the seconds until all episodes have ended, and those from the end of the 256th until 256 are left."""
            length = POLICY_TOKENS // turns
            params = SamplingParams(max_tokens=POLICY_TOKENS, min_tokens=length - 1, stop=())
            sampler = (
                EpisodeSampler(
                    engine,
                    policy.tokenizer,
                    pool,
                    max_turns=turns,
                    longest=lambda of_the_policy: of_the_policy + 12 * turns,
                )
                if pool
                else engine
            )
            requests = [
                Request(q, tuple(range(i * 10, i * 10 + SAMPLES)), example=Example(q, q, str(turns)))
                for i, q in enumerate(questions)
            ]
            if pool is None:
                params = SamplingParams(max_tokens=POLICY_TOKENS, min_tokens=POLICY_TOKENS, stop=())
            started = time.perf_counter()
            tokens, ends = 0, []  # when each ended
            for completion in sampler.sample(requests, params):
                tokens += completion.episode.num_policy_tokens if completion.episode else completion.num_tokens
                ends.append(time.perf_counter() - started)
            if not seen:
                print(f"  {turns} turns: {tokens / len(ends):.1f} tokens an episode", flush=True)
            row_count = SAMPLES * QUESTIONS
            return ends[-1], ends[-row_count - 1] - ends[row_count - 1] if len(ends) > row_count else 0.0

        few = every[:QUESTIONS]
        ways = {f"{n} turns, a token each": (n, short, few) for n in (1, 2, 4, 8)} | {BARE: (1, None, few)}
        ways |= {"4 turns, 10 tokens each": (4, quick, few), SLOW: (4, slow, few)}
        long_ways = {WORK: (4, quick, every), SLOW_WORK: (4, slow, every)}
        times: dict[str, list[float]] = {name: [] for name in (*ways, *long_ways, BUSY_WORK, BUSY_SLOW_WORK)}
        with closing(short), closing(quick), closing(slow):
            seen = False
            for repeat in range(arguments.repeats + 1):
                each = [*ways.items()] * (3 if repeat else 1) + [*long_ways.items()]
                for name, way in each[:: 1 if repeat % 2 else -1]:
                    seconds, busy = play(*way)
                    if repeat:  # the first is not timed
                        times[name].append(seconds)
                        if name in WHILE_OTHERS_WAIT:
                            times[WHILE_OTHERS_WAIT[name]].append(busy)
                seen = True
    goals = {"4 turns, a token each": "<= 1.15", BUSY_SLOW_WORK: "<= 1.1"}
    print("| way | seconds | ratio | to |\n|---|--:|--:|---|")
    rows = []
    for name, found in times.items():
        other = {SLOW_WORK: WORK, BUSY_SLOW_WORK: BUSY_WORK}.get(name, ONE if name in ways else name)
        ratio = statistics.median(a / b for a, b in zip(found, times[other], strict=True))
        print(f"| {name} | {statistics.median(found):.2f} | {ratio:.2f} | {other} |")
        if name not in (ONE, BARE, WORK, BUSY_WORK):
            one = statistics.median(times[other])
            rows.append(Row("turns", name, other, "s", ratio * one, one, goals.get(name, "")))
    write(arguments.json, rows)


if __name__ == "__main__":
    main()
