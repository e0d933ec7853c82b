"""Pairs: how rows are read, which ones are refused, and which responses of a question become pairs."""

import json
import random
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import a_rollout, an_episode
from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.data.pairs import OF_EPISODES, load_pairs, pair_row, pair_up
from rlvr_cli.data.prompts import PromptTemplate
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import read_rollouts
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.training.session import warn_of_shared_questions

TEMPLATE = PromptTemplate("t", "Q: {question} A:")
ROW = {"prompt": "1+1?", "chosen": " 2", "rejected": " 3"}


def load(path, **how):
    return load_pairs(str(path), TEMPLATE, **{"pairs_per_question": 4, "seed": 0, "runs_dir": "none"} | how)


@pytest.fixture
def written(tmp_path):
    def write(*rows):
        path = tmp_path / "p.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


def test_thinking_is_opened_once(written):
    """Where the template has made the prompt, and its tokens are not given: as in traces of `rlvr sft`."""
    texts = {"chosen": "<think> a </think> 2", "rejected": "3"}
    path = written({"question": "1+1?"} | texts, {"prompt": "1+1? <think>"} | texts)
    template = PromptTemplate("t", "{question} <think>")
    once, twice = (
        load_pairs(str(path), template, pairs_per_question=4, seed=0, opened_twice=before) for before in (False, True)
    )
    assert [e.response for e in once.examples] == [" a </think> 2", "3", texts["chosen"], "3"]
    assert [e.response for e in twice.examples] == [texts["chosen"], "3"] * 2
    assert (once.num_opened, twice.num_opened) == (1, 0)
    for chosen, problem in (("<think>", "no chosen response"), ("<think>3", "are the same")):
        with pytest.raises(RlvrError, match=problem):
            load_pairs(
                str(written({"question": "q"} | texts | {"chosen": chosen})), template, pairs_per_question=4, seed=0
            )
    assert "1 responses begin with <think>" in " ".join(once.messages)
    assert not twice.messages


def test_a_prompt_is_formatted_and_a_question_is_not(written):
    question = {"question": "1+1?", "chosen": " 2", "rejected": " 3", "id": "b"}
    pairs = load(written(ROW, question))
    assert [(e.id, e.prompt, e.response) for e in pairs.examples] == [
        ("p-1, chosen", "1+1?", " 2"),
        ("p-1, rejected", "1+1?", " 3"),
        ("b, chosen", "Q: 1+1? A:", " 2"),
        ("b, rejected", "Q: 1+1? A:", " 3"),
    ]
    assert pairs.token_ids == {}
    assert load(written({"Prompt": "1+1?", "chosen": " 2", "rejected": " 3"})).examples[0].prompt == "1+1?"
    for field, row in (("prompt", ROW), ("q", ROW | {"q": "1+1?"})):
        assert load(written(row), question_field=field).examples[0].prompt == "Q: 1+1? A:"
    both = {"question_field": "q", "field_is_shared": True}  # of evaluation questions, too
    assert load(written(ROW), **both).examples[0].prompt == "1+1?"
    assert load(written(ROW | {"q": "1+1?"}), **both).examples[0].prompt == "Q: 1+1? A:"


def test_sampled_ids_are_read(written):
    ids = {"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8, 9]}
    pairs = load(written(ROW | ids, ROW))
    assert [tuple(i) for i in pairs.token_ids.values()] == [([5, 6], [7], None, ()), ([5, 6], [8, 9], None, ())]
    assert [*pairs.token_ids] == ["p-1, chosen", "p-1, rejected"]
    assert load(written(ROW)).fingerprint != load(written(ROW | ids)).fingerprint
    assert load(written(ROW)).fingerprint == load(written(ROW)).fingerprint


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "p.jsonl:1: not valid JSON"),
        ({"prompt": "a", "response": "b"}, "p.jsonl:1: no chosen response; the keys are prompt, response."),
        (ROW | {"rejected": "  "}, "no rejected response"),
        (ROW | {"rejected": " 2"}, "the chosen and the rejected response are the same"),
        ({"chosen": "a", "rejected": "b"}, "no prompt: looked for question, problem, prompt"),
        (ROW | {"chosen": [{"role": "user"}]}, "'chosen' should be text or a number; it is a list"),
        (ROW | {"prompt_ids": [1]}, "it has some of prompt_ids, chosen_ids, rejected_ids, but not all"),
        (ROW | {"prompt_ids": ["a"]}, "'prompt_ids' is not a list of token ids"),
        (ROW | {"prompt_ids": [10**12]}, "'prompt_ids' is not a list of token ids"),
        (ROW | {"prompt_ids": "1 2"}, "'prompt_ids' is not a list of token ids"),
    ],
)
def test_a_bad_row_is_refused_by_name_or_left_out(written, row, problem):
    with pytest.raises(RlvrError) as raised:
        load(written(row, ROW))
    assert problem in raised.value.problem
    assert raised.value.hint.endswith("--skip-bad-lines")
    pairs = load(written(row, ROW), skip_bad_lines=True)
    assert len(pairs.examples) == 2
    assert [m for m in pairs.messages if m.startswith("skipped: ") and problem in m]
    with pytest.raises(RlvrError, match="none of its 1 rows can be used"):
        load(written(row), skip_bad_lines=True)


def test_an_id_is_given_once(written):
    with pytest.raises(RlvrError, match=r"p.jsonl:2: the id a is taken: .*p.jsonl:1 has it too"):
        load(written(ROW | {"id": "a"}, ROW | {"id": "a"}))


def test_what_is_neither_file_nor_run_is_refused(tmp_path):
    (tmp_path / "pairs").write_text("")
    for spec, problem in (
        ("nothing", "There is no file or run"),
        ("", "--dataset is missing"),
        (tmp_path / "pairs", "what kind of file"),
    ):
        with pytest.raises(RlvrError, match=problem):
            load(spec)


def rows_of(right, wrong, *, failed=0):
    rewards = [1.0] * right + [0.0] * wrong + [None] * failed
    return [{"id": i, "prompt": "q", "response": f"r{i}", "reward": reward} for i, reward in enumerate(rewards)]


@given(st.integers(0, 6), st.integers(0, 6), st.integers(1, 40), st.integers(0, 3))
def test_pairs_are_different_and_use_responses_evenly(right, wrong, count, seed):
    rows = rows_of(right, wrong, failed=2)
    pairs = pair_up(rows, count=count, seed=seed)
    assert len({(a["id"], b["id"]) for a, b in pairs}) == len(pairs) == min(count, right * wrong)
    assert all(a["reward"] == 1 and b["reward"] == 0 for a, b in pairs)
    for side, size in ((0, right), (1, wrong)):
        uses = Counter(pair[side]["id"] for pair in pairs)
        assert max(uses.values(), default=0) - min((uses[i] for i in uses), default=0) <= 1
        assert len(uses) == min(size, len(pairs))
    assert pairs == pair_up(rows, count=count, seed=seed)


def test_the_seed_chooses_pairs_and_equal_responses_count_once():
    assert pair_up(rows_of(6, 6), count=3, seed=0) != pair_up(rows_of(6, 6), count=3, seed=1)
    rows = [row | {"response": "same" if row["reward"] else row["response"]} for row in rows_of(4, 2)]
    assert len(pair_up(rows, count=9, seed=0)) == 2
    nan = [{"id": 0, "prompt": "q", "response": "a", "reward": float("nan")}, *rows_of(1, 0)]
    assert pair_up(nan, count=9, seed=0) == []
    graded_both_ways = [row | {"response": "same"} for row in rows_of(1, 1)]
    assert pair_up(graded_both_ways, count=9, seed=0) == []
    assert len(pair_up([*graded_both_ways, *rows_of(2, 1)], count=9, seed=0)) == 2


def test_a_row_has_the_ids_if_all_are_known():
    chosen = {"id": "a", "prompt": "q", "response": "1", "prompt_ids": (1, 2), "response_ids": (3,)}
    rejected = chosen | {"id": "b", "response": "2", "response_ids": (4,)}
    row = pair_row(chosen, rejected)
    assert (row["id"], row["chosen_id"], row["rejected_id"]) == ("a>b", "a", "b")
    assert (row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]) == ([1, 2], [3], [4])
    assert "chosen_ids" not in pair_row(chosen, rejected | {"response_ids": ()})
    assert "chosen_ids" not in pair_row(chosen, rejected | {"prompt_ids": (1, 9)})


def test_pairs_of_a_run_are_of_its_training_rollouts(tmp_path):
    def rollout(question, sample, reward, *, run="r", **more):
        more = {"phase": "train", "response": f" {question}{sample}", "finish_reason": "stop"} | more
        return a_rollout(run_id=run, example_id=question, sample_index=sample, prompt=question, reward=reward, **more)

    rows = [
        *(rollout("a", i, reward) for i, reward in enumerate((1.0, 0.0, 0.0, None))),
        *(rollout("b", i, 1.0) for i in range(3)),
        rollout("c", 0, 1.0),
        rollout("c", 1, 0.0, finish_reason="length"),
        rollout("c", 2, 0.0, response="  "),
    ]

    def held_out(run):
        return [rollout("d", i, float(i), phase="eval", run=run) for i in range(2)]

    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        run.commit_rollouts("train", 0, rows)
        run.commit_rollouts("eval", 0, held_out("r"))
    pairs = load("r", runs_dir=str(tmp_path))
    assert pairs.fingerprint == load("r", runs_dir=str(tmp_path), question_field="prompt").fingerprint
    texts = [e.response for e in pairs.examples]
    assert sorted(zip(texts[::2], texts[1::2], strict=True)) == [(" a0", " a1"), (" a0", " a2")]
    assert pairs.messages == [
        "2 responses were cut at their length limit or as episodes, empty, or not sampled by the policy alone, and are left out"
    ]
    assert len(load("r", runs_dir=str(tmp_path), pairs_per_question=1).examples) == 2
    with RunDir.create(tmp_path, "eval", name="e", metadata={}) as run:
        run.commit_rollouts("eval", 0, held_out("e"))
    assert [e.response for e in load("e", runs_dir=str(tmp_path)).examples] == [" d1", " d0"]
    with RunDir.create(tmp_path, "sft", name="s", metadata={}) as run:
        run.commit_rollouts("eval", 0, held_out("s"))
    with pytest.raises(RlvrError, match="s is a run of rlvr sft that has sampled nothing to train on, only its eval"):
        load("s", runs_dir=str(tmp_path))
    with RunDir.create(tmp_path, "eval", name="same", metadata={}) as run:
        run.commit_rollouts("eval", 0, [rollout("b", i, 1.0, phase="eval", run="same") for i in range(3)])
    with pytest.raises(
        RlvrError, match="both a right and a wrong response among its 3 eval rollouts; a response that was graded"
    ):
        load("same", runs_dir=str(tmp_path))


def test_of_a_run_of_episodes_is_said_that_they_cannot_be_pairs(tmp_path):
    mine = {"environment": {"name": "guess.py:Guess"}}
    for name, facts, hint in (("e", mine, OF_EPISODES), ("text", {}, "Sample more responses per question")):
        rows = [an_episode(2, 1, 2, run_id=name, sample_index=i, reward=float(i)) for i in range(2)]
        with RunDir.create(tmp_path, "eval", name=name, metadata={"facts": facts}) as run:
            run.commit_rollouts("eval", 0, [*rows, a_rollout(run_id=name, sample_index=2)])
        with pytest.raises(RlvrError) as raised:
            load(name, runs_dir=str(tmp_path))
        assert "among its 1 eval rollouts; 2 responses were cut" in raised.value.problem
        assert "not sampled by the policy alone, and are left out" in raised.value.problem
        assert raised.value.hint.startswith(hint)
    with RunDir.create(tmp_path, "eval", name="short", metadata={"facts": mine}) as run:
        cut = {"finish_reason": "length"}
        run.commit_rollouts(
            "eval", 0, [a_rollout(run_id="short", sample_index=i, **(cut if i else {})) for i in (0, 1)]
        )
    with pytest.raises(RlvrError) as raised:
        load("short", runs_dir=str(tmp_path))
    assert raised.value.hint.startswith("Sample more responses per question")


def test_pairs_of_a_run_are_those_of_all_its_rollouts_at_once(tmp_path):
    """Equal responses of several steps, whose ids differ, in parts that are not in order; with evaluations in between."""
    draw = random.Random(0)
    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        for phase, step in (("train", 2), ("eval", 2), ("train", 0), ("train", 1)):
            for questions in ("ba", "c"):
                rows = [
                    a_rollout(
                        run_id="r", phase=phase, step=step, example_id=question, sample_index=i, prompt=question,
                        response=f" {(n := draw.randrange(9))}", reward=(1.0, 0.0, 0.2, None)[n % 4],
                        finish_reason=draw.choice(["stop"] * 5 + ["length"]),
                        response_ids=(draw.randrange(99), draw.randrange(99)), sampled_logprobs=(-1.0, -1.0),
                        num_response_tokens=2, response_mask=draw.choice([None] * 5 + [(True, False)]),
                    )
                    for question in questions
                    for i in draw.sample(range(8), 8)
                ]  # fmt: skip
                run.commit_rollouts(phase, step, rows)
    rows = read_rollouts(tmp_path / "r", phase="train").to_pylist()
    rows.sort(key=lambda r: (r["step"], r["example_id"], r["sample_index"]))
    usable = [r for r in rows if r["finish_reason"] != "length" and all(r["response_mask"] or [])]
    groups = [[r for r in usable if r["prompt"] == prompt] for prompt in dict.fromkeys(r["prompt"] for r in usable)]
    expected = [
        (
            f"train/{r['step']}/{r['example_id']}/{r['sample_index']}",
            r["prompt"],
            r["response"],
            (r["prompt_ids"], r["response_ids"]),
        )
        for group in groups
        for pair in pair_up(group, count=4, seed=5)
        for r in pair
    ]
    pairs = load("r", runs_dir=str(tmp_path), seed=5)
    ids = [i for e in pairs.examples[::2] for i in e.id.removesuffix(", chosen").split(">")]
    texts = [(e.prompt, e.response, pairs.token_ids[e.id][:2]) for e in pairs.examples]
    assert [(i, *text) for i, text in zip(ids, texts, strict=True)] == expected
    assert pairs.messages[0].startswith(f"{len(rows) - len(usable)} responses")


def test_of_a_run_the_tokens_of_the_pairs_alone_are_in_memory(tmp_path):
    ids = tuple(range(1000, 2000))
    rows = [
        a_rollout(
            run_id="r", sample_index=i, response=f" {i}", reward=float(i % 2), response_ids=ids, num_response_tokens=len(ids),
            sampled_logprobs=(-1.0,) * len(ids),
        )
        for i in range(24)
    ]  # fmt: skip
    with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
        run.commit_rollouts("eval", 0, rows)
    tracemalloc.start()
    try:
        assert len(load("r", runs_dir=str(tmp_path), pairs_per_question=1).examples) == 2
        assert tracemalloc.get_traced_memory()[1] < 8 * 36 * len(ids), "those of a third of all"
    finally:
        tracemalloc.stop()


def test_of_held_out_questions_in_pairs_is_warned_of(tmp_path, written, capsys):
    """Whether the pairs are of a run, or of a file that has the question beside the prompt, as `rlvr filter` writes it."""
    with RunDir.create(tmp_path, "eval", name="e", metadata={"facts": {"prompt": {"text": "Q: {question} A:"}}}) as run:
        rows = [
            a_rollout(run_id=run.id, sample_index=i, prompt="Q: 1+1? A:", response=f" {i}", reward=i) for i in (0, 1)
        ]
        run.commit_rollouts("eval", 0, rows)
    (tmp_path / "held-out.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "1"}))
    held_out = load_dataset(str(tmp_path / "held-out.jsonl"))
    for source in ("e", written(ROW | {"prompt": "Q: 1+1? A:", "question": "1+1?"})):
        examples = load(source, runs_dir=str(tmp_path)).examples
        assert [e.prompt for e in examples] == ["Q: 1+1? A:"] * 2
        warn_of_shared_questions(examples, held_out)
        assert "1 of the 1 evaluation questions are also trained on" in capsys.readouterr().err
