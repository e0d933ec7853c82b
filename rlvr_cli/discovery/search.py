"""The search: round after round, prompts are made of what earlier rounds found, answered, and the programs in the answers tried.

Enters: a task, an open run and a proposer. Leaves: a committed part of rollouts for each round, the points of valid attempts in points/,
and the best program in best/.

A round is a step, a slot of it a sample. The prompts of a round depend only on committed rows of earlier rounds, and each slot has random
numbers of its own (`request_seed`), so that nothing depends on which answer comes first. Each response is committed as a segment when it
arrives, before its program runs: a killed run asks only for those that it lacks, and the part of a round is the same.
"""

import hashlib
import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from rlvr_cli.config.discover import Strategy
from rlvr_cli.data.prompts import PromptTemplate
from rlvr_cli.discovery.attempts import (
    COLUMNS,
    Known,
    Ran,
    Trial,
    best_of,
    judged,
    known_of,
    name_of,
    row_of,
    run_response,
    sha256_of,
)
from rlvr_cli.discovery.fitting import Fitting
from rlvr_cli.discovery.strategies import Plan, plan_slot, prompt_of, standing_of
from rlvr_cli.discovery.tasks import Task
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.grading import check_grade_errors, stored_errors, utc_now_naive
from rlvr_cli.rollouts.metrics import AVERAGED, SamplingStats, generation_metrics
from rlvr_cli.rollouts.requests import request_seed
from rlvr_cli.runs.check import POINTS
from rlvr_cli.runs.readers import read_parts
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.files import (
    atomic_write,
    damaged_file,
    fsync_directory,
    os_errors_as_user_errors,
    read_regular,
    typed,
    write_together,
)
from rlvr_cli.sandbox.run import Limits
from rlvr_cli.text import storable
from rlvr_cli.types import Completion, Phase, Request, Sampler, SamplingParams, Segment

PHASE: Phase = "eval"
BEST = "best"  # folder of the run
_POLL = 0.2  # seconds between looks at a Ctrl-C while programs run


@dataclass(frozen=True)
class Settings:
    """How to search; as the options of these names, but the last."""

    strategy: Strategy
    rounds: int
    num_samples: int
    parents: int
    islands: int
    seed: int
    limits: Limits
    require_sandbox: bool = False
    concurrency: int = 2
    max_attempts: int | None = None
    max_tokens: int | None = None
    target: float | None = None
    only_best_is_best: bool = True  # whether prompts call no other program the best

    @property
    def planned_attempts(self) -> int:
        """The most attempts that the search can have."""
        whole = self.rounds * self.num_samples
        return whole if self.max_attempts is None else min(whole, self.max_attempts)

    def slots(self, round: int) -> range:
        """The slots of a round; the last round may have fewer."""
        left = self.planned_attempts - round * self.num_samples
        return range(max(0, min(self.num_samples, left)))


@dataclass(frozen=True)
class Search:
    """What every round needs."""

    run: RunDir
    task: Task
    proposer: Sampler
    params: SamplingParams
    template: PromptTemplate  # around each prompt: a chat template, or nothing
    fitting: Fitting  # of each prompt to the model's context
    settings: Settings
    start_score: float | None  # of the program to start from
    start: tuple[Known, ...]  # that program, if it is valid: attempts compete with it
    stop: StopRequest
    report: Callable[[str], None]

    def best(self, known: Sequence[Known]) -> Known | None:
        """The best of these attempts and of the program to start from."""
        return best_of([*self.start, *known])


def search(to_do: Search) -> list[Known]:
    """Search until the rounds are done, or a limit is reached. Returns all attempts of the run.

    Raises:
        Interrupted: `stop` was requested; responses that have arrived are stored.
        RlvrError: the proposer failed for good, as an endpoint does that refuses the key, or the verifier did (`_check_verifier`); likewise. Or
            there is a limit on tokens, and nobody counts them.
    """
    known = read_attempts(to_do.run)
    remove_leftovers(to_do.run.path)
    keep_best(to_do.run.path, to_do.best(known))
    if known:
        _log_round(to_do, known, known[-1].round)
    for round in range(to_do.settings.rounds):
        committed = {k.slot for k in known if k.round == round}
        slots = [slot for slot in to_do.settings.slots(round) if slot not in committed]
        if committed and not slots:
            continue
        if not slots or _is_done(to_do, known):
            break
        _check_counts(to_do, known)
        earlier = [k for k in known if k.round < round]
        _round(to_do, earlier, round, slots)
        known = earlier + known_of(to_do.run.rollouts(PHASE, round, columns=COLUMNS).to_pylist())
        keep_best(to_do.run.path, to_do.best(known))
        _log_round(to_do, known, round)
        to_do.report(_line(to_do, known, round))
        _check_verifier(to_do, known, round)
    return known


def read_attempts(run: RunDir) -> list[Known]:
    """Read the committed attempts of a run, by number."""
    return known_of(row for part in read_parts(run.path, phase=PHASE, columns=COLUMNS) for row in part.to_pylist())


def plan_round(
    known: Sequence[Known], settings: Settings, task: Task, *, round: int, slots: Sequence[int]
) -> dict[int, Plan]:
    """Choose the parents of each slot, as `plan_slot`. The random numbers of a slot are a function of seed, round and slot."""
    standing = standing_of(known)
    return {
        slot: plan_slot(
            standing,
            strategy=settings.strategy,
            round=round,
            slot=slot,
            num_samples=settings.num_samples,
            islands=settings.islands,
            parents=settings.parents,
            generator=random.Random(f"parents {seed_of(settings, task, round=round, slot=slot)}"),
        )
        for slot in slots
    }


def seed_of(settings: Settings, task: Task, *, round: int, slot: int) -> int:
    return request_seed(settings.seed, phase=PHASE, step=round, example_id=task.name, sample_index=slot)


def _is_done(to_do: Search, known: Sequence[Known]) -> bool:
    settings, best = to_do.settings, to_do.best(known)
    reached = settings.target is not None and best is not None and best.score >= settings.target
    return reached or (settings.max_tokens is not None and sum(k.tokens for k in known) >= settings.max_tokens)


def _check_counts(to_do: Search, known: Sequence[Known]) -> None:
    """Raise RlvrError if tokens are limited, and those of an attempt are not known."""
    most = to_do.settings.max_tokens
    if most is not None and not all(k.counted for k in known):
        raise RlvrError(
            f"The endpoint does not count tokens: its answers have no usage, and --max-tokens {most} would never take effect.",
            f"Limit attempts instead: rlvr discover --resume {typed(to_do.run.place)} --max-tokens 0 --max-attempts N",
        )


def _check_verifier(to_do: Search, known: Sequence[Known], round: int) -> None:
    """Raise RlvrError if the verifier failed on all that it was asked in a round; if that is one program, also on the last one before it."""
    verdicts = [k for k in known if k.judged]
    count = sum(k.round == round for k in verdicts)
    asked = verdicts[-max(2, count) :] if count else []
    if len(asked) > 1 and all(k.reward is None for k in asked):
        hint = (
            "The verifier must judge whatever a program may give: correct verify.py, and start a new run. "
            f"To go on in spite of it: rlvr discover --resume {typed(to_do.run.place)}"
        )
        rounds = sorted({k.round for k in asked})
        errors = chain.from_iterable(stored_errors(to_do.run.path, phase=PHASE, step=step) for step in rounds)
        of = f"round{'s' * (len(rounds) > 1)} {' and '.join(map(str, rounds))}"
        check_grade_errors(errors, at_most=0, of=of, hint=hint)


def _round(to_do: Search, known: Sequence[Known], round: int, slots: Sequence[int]) -> None:
    """Answer the prompts of these slots of a round, try the programs, and commit the rows.

    Args:
        known: the attempts of earlier rounds.
    """
    run, task, settings = to_do.run, to_do.task, to_do.settings
    plans = plan_round([*to_do.start, *known], settings, task, round=round, slots=slots)
    best = to_do.best(known)
    prompts = {slot: _prompt(to_do, plan, best=best) for slot, plan in plans.items()}
    trials, cost = _tried(to_do, known, round, slots, prompts)
    segments = {segment.sample_index: segment for segment in run.segments(round, phase=PHASE)}
    first = round * settings.num_samples
    rows = [
        row_of(
            segments[slot],
            trials[slot],
            number=first + slot,
            parents=tuple(parent.number for parent in plans[slot].parents if not parent.is_start),
            island=plans[slot].island,
            prompt=storable(prompts[slot]),
            proposer=to_do.proposer.engine,
            grader=task.grader,
        )
        for slot in slots
    ]
    store_points(run.path, [trials[slot].points for slot in slots])
    cost = replace(cost, tokens=sum(row.num_response_tokens for row in rows))
    run.commit_rollouts(PHASE, round, rows, cost=cost.cost)


def _prompt(to_do: Search, plan: Plan, *, best: Known | None) -> str:
    highest = best.score if best is not None and to_do.settings.only_best_is_best else 0.0

    def written(shown: int | None) -> str:
        said = prompt_of(to_do.task, plan.parents, start_score=to_do.start_score, best=highest, shown=shown)
        return to_do.template.fill(said)

    return written(None) if to_do.proposer.engine == "mutate" else to_do.fitting.prompt(written)


def _tried(
    to_do: Search, known: Sequence[Known], round: int, slots: Sequence[int], prompts: Mapping[int, str]
) -> tuple[dict[int, Trial], SamplingStats]:
    """Answer the prompts, run the programs in threads, and judge here what they gave. Returns trials by slot, and the time it took.

    Args:
        known: the attempts of earlier rounds.
    """
    run, settings = to_do.run, to_do.settings
    started = time.monotonic()
    programs: dict[int, Future[Ran]] = {}
    pool = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="rlvr-discover")
    at_once = False
    tried = partial(
        run_response,
        limits=settings.limits,
        require_sandbox=settings.require_sandbox,
        earlier={k.sha256: k for k in reversed(known) if k.sha256 is not None},
    )
    try:
        for segment in run.segments(round, phase=PHASE):
            if segment.sample_index in slots:
                programs[segment.sample_index] = pool.submit(tried, segment.response)
        lacking = [slot for slot in slots if slot not in programs]
        with run.activity.doing(f"round {round}", total=len(lacking), unit="responses"):
            for slot, response in _answers(to_do, round, lacking, prompts):
                programs[slot] = pool.submit(tried, response)
        waited = time.monotonic() - started
        with run.activity.doing(f"round {round}: programs", total=len(programs), unit="programs"):
            trials = {slot: judged(_result(programs[slot], to_do), to_do.task) for slot in slots}
    except KeyboardInterrupt:  # another Ctrl-C
        at_once = True
        raise
    finally:
        pool.shutdown(wait=not at_once, cancel_futures=True)
    return trials, SamplingStats(0, waited, waited, time.monotonic() - started - waited)


def _answers(to_do: Search, round: int, slots: Sequence[int], prompts: Mapping[int, str]) -> Generator[tuple[int, str]]:
    """Yield (slot, response) of each slot as it arrives, stored."""
    if not slots:
        return
    first, settings = round * to_do.settings.num_samples, to_do.settings
    seeds = [seed_of(settings, to_do.task, round=round, slot=slot) for slot in slots]
    requests = [Request(prompts[slot], (seed,), str(first + slot)) for slot, seed in zip(slots, seeds, strict=True)]
    completions = to_do.proposer.sample(requests, to_do.params)

    def stored(completion: Completion) -> tuple[int, str]:
        index = completion.request_index
        segment = _segment(completion, to_do, round=round, slot=slots[index], seed=seeds[index])
        to_do.run.commit_segments(round, [segment], phase=PHASE)
        to_do.run.activity.progress()
        return segment.sample_index, segment.response

    try:
        for completion in completions:
            fault_point("sampled")
            yield stored(completion)
            to_do.stop.check()
    except (Interrupted, RlvrError):
        completions.close()
        for completion in to_do.proposer.arrived:
            stored(completion)
        raise
    finally:
        completions.close()


def _segment(completion: Completion, to_do: Search, *, round: int, slot: int, seed: int) -> Segment:
    return Segment(
        run_id=to_do.run.id,
        phase=PHASE,
        step=round,
        policy_version=to_do.proposer.policy_version,
        example_id=to_do.task.name,
        sample_index=slot,
        start=0,
        response=storable(completion.text),
        prompt_ids=completion.prompt_ids,
        response_ids=completion.token_ids,
        sampled_logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        mean_entropy=completion.mean_entropy,
        seed=seed,
        sampled_at=utc_now_naive(),
        num_prompt_tokens=completion.num_prompt_tokens,
        num_response_tokens=completion.num_tokens,
    )


def _result(program: Future[Ran], to_do: Search) -> Ran:
    """Wait for a program, looking at Ctrl-C; those that run then end by their own time limit."""
    to_do.stop.check()
    while not wait([program], timeout=_POLL).done:
        to_do.stop.check()
    to_do.run.activity.progress()
    return program.result()  # raises what went wrong here; what goes wrong in a program is in its execution


# Files beside the rows


def store_points(run: Path, points: Sequence[str | None]) -> None:
    """Write the points of valid programs, each into a file named by its sha256."""
    for text in dict.fromkeys(text for text in points if text is not None):
        path = run / POINTS / f"{sha256_of(text)}.json"
        _make_folder(run, POINTS)
        if not path.exists():
            atomic_write(path, text.encode())


def keep_best(run: Path, best: Known | None) -> None:
    """Write best/program.py and best/points.json, unless they are those of this program already."""
    if best is None or best.program is None or best.points_sha256 is None:
        return
    program = best.program.encode()
    points = read_regular(run, f"{POINTS}/{best.points_sha256}.json")
    if hashlib.sha256(points).hexdigest() != best.points_sha256:
        raise damaged_file(run / POINTS / f"{best.points_sha256}.json", "its sha256 is not its name")
    _make_folder(run, BEST)
    files = [(run / BEST / "program.py", program), (run / BEST / "points.json", points)]
    if not all(path.is_file() and path.read_bytes() == data for path, data in files):
        write_together(files)


def remove_leftovers(run: Path) -> None:
    """Delete the temporary files of writes that a kill cut off."""
    for folder in (POINTS, BEST):
        for path in (run / folder).glob(".*.tmp"):
            with os_errors_as_user_errors(path):
                path.unlink()


def _make_folder(run: Path, name: str) -> None:
    with os_errors_as_user_errors(run / name):
        if not (run / name).is_dir():
            (run / name).mkdir()
            fsync_directory(run)


# What a round was like


def _log_round(to_do: Search, known: Sequence[Known], round: int) -> None:
    run, best = to_do.run, to_do.best(known)
    of_round = [k for k in known if k.round == round]
    metrics = generation_metrics(run.rollouts(PHASE, round, columns=AVERAGED).to_pylist())
    metrics |= SamplingStats.of_cost(run.cost(PHASE, round)).metrics
    metrics |= {"discover/valid_share": sum(k.is_valid for k in of_round) / len(of_round)}
    metrics |= {} if best is None else {"discover/best": best.score}
    run.commit_metrics(round, PHASE, metrics)


def _line(to_do: Search, known: Sequence[Known], round: int) -> str:
    of_round, best = [k for k in known if k.round == round], to_do.best(known)
    found = "nothing valid yet" if best is None else f"best {best.score:g} ({name_of(best)})"
    return f"round {round}: {sum(k.is_valid for k in of_round)} of {len(of_round)} valid, {found}"
