"""Which programs a prompt shows, and what it says of them: by hand, and whatever the order of the rows."""

import random
from dataclasses import replace

import pytest

from rlvr_cli.discovery.attempts import Known, best_of, known_of
from rlvr_cli.discovery.strategies import SHOWN_CHARACTERS, plan_slot, prompt_of
from rlvr_cli.discovery.tasks import load_task

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


def parents(attempts, strategy="refine", *, slot=0, round=9, islands=2, count=2, seed=0):
    plan = plan_slot(
        attempts,
        strategy=strategy,
        round=round,
        slot=slot,
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


def test_better_programs_are_drawn_more_often():
    attempts = [known(i, float(i + 1)) for i in range(4)]
    drawn = [parents(attempts, "islands", islands=1, round=3, count=1, seed=seed)[0] for seed in range(400)]
    counts = [drawn.count(i) for i in range(4)]
    assert counts == sorted(counts)
    assert counts[3] == pytest.approx(400 * 8 / 15, abs=40)


def test_the_first_prompt_has_the_program_to_start_from():
    prompt = prompt_of(TASK, [], start_score=22.0)
    assert prompt.startswith(TASK.prompt.rstrip())
    assert f"with a score of 22:\n\n```python\n{TASK.program.rstrip()}\n```" in prompt


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
