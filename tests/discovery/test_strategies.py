"""Which programs a prompt shows, and what it says of them: by hand, and whatever the order of the rows."""

import random
from dataclasses import replace

import pytest

from rlvr_cli.discovery.attempts import START, Known, best_of, by_rank, known_of, known_start, name_of
from rlvr_cli.discovery.fitting import SHOWN_CHARACTERS
from rlvr_cli.discovery.search import Settings, plan_round
from rlvr_cli.discovery.strategies import plan_slot, prompt_of, standing_of, turn_of
from rlvr_cli.discovery.tasks import load_task
from rlvr_cli.sandbox.run import Limits

TASK = load_task("kissing", dim=11, start="", searches=False, seconds=10.0)


def known(
    number, score, *, slot=0, island=0, program=None, error="Minimum squared distance 36 < maximum squared norm 40"
):
    """An attempt of one slot a round; a score of None: not valid."""
    program = f"points = {number}" if program is None else program
    valid = score is not None
    return Known(
        number=number,
        round=number,
        slot=slot,
        island=island,
        parents=(),
        program=program,
        sha256=program,
        reward=score or 0.0,
        failure_kind=None if valid else "invalid_condition",
        error=None if valid else error,
        num_points=None,
        points_sha256="p" if valid else None,
        tokens=10,
    )


def start(score):
    return known_start("points = 'start'", score=score, num_points=None, points_sha256="p")


def parents(attempts, strategy="refine", *, slot=0, round=9, num_samples=8, islands=2, count=2, seed=0):
    plan = plan_slot(
        standing_of(attempts),
        strategy=strategy,
        round=round,
        slot=slot,
        num_samples=num_samples,
        islands=islands,
        parents=count,
        generator=random.Random(seed),
    )
    return [parent.number for parent in plan.parents]


def test_best_of_n_shows_nothing():
    assert parents([known(0, 22.0)], "best-of-n") == []


def test_refine_shows_the_best_and_the_slots_own_failure():
    assert parents([]) == []
    assert parents([known(0, None)]) == [0]
    assert parents([known(0, 22.0), known(1, None)]) == [0, 1]
    assert parents([known(0, 22.0, slot=1), known(1, None, slot=1)], slot=0) == [0]
    assert parents([known(0, 22.0), known(1, 22.0), known(2, 20.0)]) == [0], "the first of the best"


def test_refine_gives_up_after_two_failures_in_a_row():
    assert parents([known(0, 22.0), known(1, None), known(2, None)]) == [0]
    assert parents([known(0, None), known(1, None)]) == []
    assert parents([known(0, None), known(1, 22.0), known(2, None)]) == [1, 2]


def test_islands_draw_from_their_own_but_every_fifth_round_also_from_the_best():
    attempts = [known(0, 22.0, island=0), known(1, 220.0, island=1), known(2, 30.0, island=0), known(3, None, island=0)]
    assert parents(attempts, "islands", slot=0, round=3) == [0, 2]
    assert parents(attempts, "islands", slot=1, round=3) == [1]
    assert parents(attempts, "islands", slot=0, round=4, count=3) == [0, 2, 1]
    assert parents(attempts, "islands", slot=3, round=3) == [1], "slots go round the islands"
    same = [known(0, 22.0, program="a"), known(1, 22.0, program="a")]
    assert parents(same, "islands", round=3) == [0], "one program is shown once"


def test_the_program_to_start_from_is_a_parent_until_an_attempt_is_as_good():
    assert parents([start(582.0), known(0, 22.0)]) == [START]
    assert parents([start(582.0), known(0, 22.0), known(1, None)]) == [START, 1]
    assert parents([start(22.0), known(0, 22.0)]) == [0]
    assert parents([start(22.0), known(0, 22.0)], "best-of-n") == []
    assert name_of(start(22.0)) == "the program to start from"


def test_the_program_to_start_from_competes_on_each_island_until_that_has_one_as_good():
    attempts = [start(30.0), known(0, 22.0, island=0), known(1, 220.0, island=1)]
    assert parents(attempts, "islands", slot=0, round=3) == [0, START], "the best last"
    assert parents(attempts, "islands", slot=1, round=3) == [1]
    assert parents(attempts, "islands", slot=2, round=3, islands=3) == [START], "an island without a valid attempt"
    assert parents([start(582.0), *attempts[1:]], "islands", slot=0, round=4, count=3) == [0, START], "drawn once"


def test_fewer_slots_than_islands_go_round_them_in_several_rounds():
    turns = [turn_of(round, slot, num_samples=2, islands=4) for round in range(4) for slot in range(2)]
    assert turns == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert [turn_of(3, slot, num_samples=4, islands=3) for slot in range(4)] == [(3, 0), (3, 1), (3, 2), (3, 0)]
    attempts = [known(0, 22.0, island=0), known(1, 220.0, island=1)]
    shown = [parents(attempts, "islands", round=round, num_samples=1, islands=2) for round in (2, 3, 8, 9)]
    assert shown == [[0], [1], [0, 1], [1]], "each island has its turn with the best of all"


def test_better_programs_are_drawn_more_often():
    attempts = [known(i, float(i + 1)) for i in range(4)]
    drawn = [parents(attempts, "islands", islands=1, round=3, count=1, seed=seed)[0] for seed in range(400)]
    counts = [drawn.count(i) for i in range(4)]
    assert counts == sorted(counts)
    assert counts[3] == pytest.approx(400 * 8 / 15, abs=40)


def drawn_by_hand(attempts, island, *, turn, count, generator):
    """What `islands` draws, by its definition."""
    own = [k for k in attempts if k.is_valid and k.island == island]
    started = [k for k in attempts if k.is_start and all(mine.score < k.score for mine in own)]
    best = best_of(attempts)
    migrants = [best] if best is not None and turn % 5 == 4 else []
    first = {}
    for attempt in sorted([*own, *started, *migrants], key=by_rank):
        first.setdefault(attempt.sha256, attempt)
    left, drawn = list(first.values()), []
    while left and len(drawn) < count:
        (index,) = generator.choices(range(len(left)), weights=[2.0**-i for i in range(len(left))])
        drawn.append(left.pop(index))
    return [k.number for k in sorted(drawn, key=lambda k: (k.score, -k.number))]


@pytest.mark.parametrize("size", [3, 30, 120, 400])
def test_islands_draw_by_their_definition(size):
    """Programs that fail, that are on several islands, and that are as good as others, also of the program to start from."""
    draw = random.Random(size)
    for seed in range(25):
        attempts = [
            known(
                i, draw.choice([None, *range(20, 40)]), island=draw.randrange(2), program=f"{draw.randrange(2 * size)}"
            )
            for i in range(size)
        ]
        begun = replace(start(draw.choice([30.0, 50.0])), sha256=f"{draw.randrange(2 * size)}")
        attempts = [begun, *attempts][draw.randrange(2) :]
        asked = {"turn": draw.randrange(3, 5), "count": draw.choice([1, 2, 9])}
        drawn = parents(attempts, "islands", round=asked["turn"], count=asked["count"], seed=seed)
        assert drawn == drawn_by_hand(attempts, 0, **asked, generator=random.Random(seed))


@pytest.mark.parametrize("strategy", ["refine", "islands"])
def test_a_round_goes_through_all_attempts_as_often_however_many_slots_it_has(strategy):
    class Counted(list):
        times = 0

        def __iter__(self):
            self.times += 1
            return super().__iter__()

    times = []
    for slots in (2, 32):
        attempts = Counted(known(i, 22.0 + i % 7, slot=i % 32, island=i % 4) for i in range(64))
        settings = Settings(strategy, rounds=9, num_samples=32, parents=2, islands=4, seed=0, limits=Limits())
        assert len(plan_round(attempts, settings, TASK, round=2, slots=range(slots))) == slots
        times.append(attempts.times)
    assert times[0] == times[1]


def test_the_first_prompt_has_the_program_to_start_from():
    prompt = prompt_of(TASK, [], start_score=22.0)
    assert prompt.startswith(TASK.prompt.rstrip())
    assert f"with a score of 22:\n\n```python\n{TASK.program.rstrip()}\n```" in prompt


def test_only_the_best_program_is_called_the_best():
    assert prompt_of(TASK, [start(582.0)], start_score=582.0) == prompt_of(TASK, [], start_score=582.0)
    prompt = prompt_of(TASK, [known(0, 22.0)], start_score=582.0, best=582.0)
    assert "This program is valid and has a score of 22" in prompt
    assert "best program" not in prompt
    prompt = prompt_of(TASK, [start(582.0), known(0, None)], start_score=582.0, best=582.0)
    assert "The best program so far is valid and has a score of 582:\n\n```python\npoints = 'start'\n```" in prompt


def test_an_error_goes_back_word_for_word():
    error = "Minimum squared distance 36 < maximum squared norm 40 (vectors 3 and 17)"
    prompt = prompt_of(TASK, [known(0, 22.0), known(1, None, error=error)], start_score=22.0)
    assert f"failed with this error:\n\n```text\n{error}\n```" in prompt
    assert prompt.index("points = 0") < prompt.index("points = 1"), "the program to correct comes last"
    assert "a score of 22" in prompt


def test_an_answer_without_code_is_told_so():
    failed = replace(known(0, None, error="There is no Python program in the answer"), program=None)
    prompt = prompt_of(TASK, [failed], start_score=None)
    assert "failed with this error:\n\n```text\nThere is no Python program in the answer" in prompt
    assert "None" not in prompt


def test_a_long_program_is_cut_and_its_fences_do_not_end_the_block():
    prompt = prompt_of(TASK, [known(0, 22.0, program="#" * (SHOWN_CHARACTERS + 7))], start_score=None)
    assert "# ... and 7 characters more\n```" in prompt
    assert '````python\nx = """\n```\n"""\n````' in prompt_of(
        TASK, [known(0, 1.0, program='x = """\n```\n"""')], start_score=None
    )


def test_the_best_is_the_first_of_the_highest():
    attempts = [known(0, None), known(1, 22.0), known(2, 220.0), known(3, 220.0)]
    random.Random(0).shuffle(attempts)
    best = best_of(attempts)
    assert best is not None
    assert best.number == 2
    assert best_of([known(0, None)]) is None
    assert known_of([]) == []
