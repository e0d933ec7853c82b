"""`rlvr filter`: what is kept is what was asked for, what is dropped is counted with its reason, and other commands take the file."""

import hashlib
import json
import random
import shutil
from dataclasses import replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from weakref import WeakSet

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from factories import a_rollout, an_episode
from marks import slow
from rlvr_cli.analysis.queries.selection import (
    Item,
    Question,
    Selected,
    Selection,
    ThinkingRules,
    find_contaminated,
    normalized,
    select,
)
from rlvr_cli.commands.store.filter import encoded, next_command
from rlvr_cli.commands.store.filter import run as filter_run
from rlvr_cli.commands.store.filtering.rows import fused_rows
from rlvr_cli.commands.store.filtering.sources import _description
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.config.store.filter import FilterConfig
from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.data.pairs import OF_EPISODES, load_pairs
from rlvr_cli.data.prompts import load_prompt
from rlvr_cli.data.traces import load_traces
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.training.traces import encode_traces
from rlvr_cli.types import FinishReason, Phase, Turn, TurnFacts

TEMPLATE = load_prompt("r1_zero")
RIGHT, WRONG = "</think> <answer> 7 </answer>", "</think> <answer> 8 </answer>"


def rollout(
    run_id,
    question,
    sample,
    response,
    *,
    reward,
    phase: Phase = "train",
    step=0,
    finish: FinishReason = "stop",
    tokens=10,
):
    return a_rollout(
        run_id=run_id, phase=phase, step=step, policy_version=step, example_id=question.split()[0], sample_index=sample,
        prompt=TEMPLATE.fill(question), response=response, finish_reason=finish, num_response_tokens=tokens,
        answer_reward=reward, reward=reward, grade_error=None if reward is not None else "timeout", extracted_answer=None, advantage=0.0,
    )  # fmt: skip


FACTS = {"facts": {"prompt": {"name": "r1_zero", "text": TEMPLATE.text}, "grader": "r1_zero", "dataset": {"name": "d"}}}

# (question, response, reward, finish reason, tokens), in this order
ROWS: list[tuple[str, str, float | None, FinishReason, int]] = [
    ("easy: 3 + 4?", f"a {RIGHT}", 1.0, "stop", 9),
    ("easy: 3 + 4?", f"A   {RIGHT}", 1.0, "stop", 5),  # equal to the first, ignoring case and white space
    ("easy: 3 + 4?", f"b {RIGHT}", 1.0, "stop", 4),
    ("easy: 3 + 4?", f"c {RIGHT}", 1.0, "stop", 3),
    ("half: 5 + 2?", f"d {RIGHT}", 1.0, "stop", 8),
    ("half: 5 + 2?", f"e {WRONG}", 0.0, "stop", 2),
    ("half: 5 + 2?", f"f {RIGHT}", 1.0, "stop", 7),
    ("half: 5 + 2?", "g and on", None, "length", 64),  # the grade failed
    ("hard: 8 - 1?", f"h {WRONG}", 0.0, "stop", 6),
    ("hard: 8 - 1?", " \u00a0\n", 0.0, "stop", 1),
]


@pytest.fixture
def made(once_made, tmp_path) -> Path:
    """10 training rollouts of 3 questions at step 3, and 1 of the evaluation."""
    return Path(shutil.copytree(once_made, tmp_path / "runs/r"))


@pytest.fixture(scope="module")
def once_made(tmp_path_factory) -> Path:
    with RunDir.create(tmp_path_factory.mktemp("runs"), "grpo", name="r", metadata=FACTS) as run:
        rows = [
            rollout("r", q, i, text, reward=reward, step=3, finish=finish, tokens=tokens)
            for i, (q, text, reward, finish, tokens) in enumerate(ROWS)
        ]
        run.commit_rollouts("eval", 0, [rollout("r", "eval: 1 + 6?", 0, f"x {RIGHT}", reward=1.0, phase="eval")])
        run.commit_rollouts("train", 3, rows[:4])
        run.commit_rollouts("train", 3, rows[4:])
    return run.path


@pytest.fixture
def call(tmp_path, capsys):
    """Filters into a new file; gives its rows and the stages as (name, kept, dropped)."""

    def filtered(source, *, out="out.jsonl", **flags):
        sources = tuple(map(str, source if isinstance(source, tuple) else (source,)))
        capsys.readouterr()
        given = {"source": sources, "out": str(tmp_path / out), "runs_dir": str(tmp_path / "runs"), **flags}
        filter_run(resolve(FilterConfig, flags={"format": "json", **given}, command="filter"))
        stages = json.loads(capsys.readouterr().out)
        return rows_of(tmp_path / out), [(s["stage"], s["kept"], s["dropped"]) for s in stages]

    return filtered


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.suffix == ".jsonl" else []


def starts(rows) -> str:
    """The first letters of the responses: ROWS has a different one for each."""
    return "".join(r["response"][0] for r in rows)


def test_without_a_filter_all_that_can_be_learned_from_is_kept(made, call, tmp_path):
    rows, stages = call(made)
    assert starts(rows) == "aAbcdefh"
    assert stages == [("source", 10, 0), ("whole", 8, 2)]
    assert rows[0] == {
        "id": "r/train/3/easy:/0",
        "question": "easy: 3 + 4?",
        "prompt": TEMPLATE.fill("easy: 3 + 4?"),
        "response": f"a {RIGHT}",
        "ground_truth": "7",
        "reward": 1.0,
        "step": 3,
        "run": "r",
    }
    assert not list(tmp_path.glob("*control*"))


def test_a_response_that_an_environment_took_part_in_is_no_text_to_learn(tmp_path, call):
    masks = [None, (True,), (False,)]
    with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata=FACTS) as run:
        rows = [rollout("r", f"q{i}: 3 + 4?", 0, f"{'abc'[i]} {RIGHT}", reward=1.0) for i in range(3)]
        run.commit_rollouts("train", 0, [replace(r, response_mask=m) for r, m in zip(rows, masks, strict=True)])
    rows, stages = call(run.path)
    assert starts(rows) == "ab"
    assert stages == [("source", 3, 0), ("whole", 2, 1)]


@pytest.fixture
def played(tmp_path, tiny_tokenizer) -> Path:
    """A run with an episode of three turns, whose first and last end within a token; the same again; and a response of one turn."""
    said = [tiny_tokenizer(text).input_ids for text in (" 7+7=14, ", "(right)", " <answer> 7 </answer> ")]
    texts = (" 7+7=14,", "(right)", " <answer> 7 </answer>")
    places = [
        (start, start + len(ids)) for start, ids in zip(accumulate(map(len, said), initial=0), said, strict=False)
    ]
    ends = tuple(accumulate(map(len, texts)))
    turns = tuple(Turn("environment" if i == 1 else "policy", *place) for i, place in enumerate(places))
    question = TEMPLATE.fill("q: 3 + 4?")
    plain = a_rollout(
        run_id="played", prompt=question, prompt_ids=tuple(tiny_tokenizer(question).input_ids), response=" 7", reward=1.0,
        response_ids=tuple(tiny_tokenizer(" 7").input_ids), ground_truth="7", sample_index=2,
    )  # fmt: skip
    plain = replace(
        plain, num_response_tokens=len(plain.response_ids), sampled_logprobs=(-1.0,) * len(plain.response_ids)
    )
    mask = tuple(turn.role == "policy" for turn in turns for _ in range(turn.start, turn.end))
    episode = replace(
        plain, response="".join(texts), response_ids=tuple(i for ids in said for i in ids), num_response_tokens=len(mask), turns=turns,
        response_mask=mask, sampled_logprobs=tuple(-1.0 * own for own in mask), turn_facts=TurnFacts(ends, (), ()),
        episode=an_episode(1, 1, 1).episode._replace(num_policy_tokens=sum(mask), graded_from=ends[1], graded_to=ends[2]),
    )  # fmt: skip
    metadata = FACTS | {"config": {"environment": "guess.py:Guess"}}
    with RunDir.create(tmp_path / "runs", "eval", name="played", metadata=metadata) as run:
        run.commit_rollouts("eval", 0, [replace(episode, sample_index=i) for i in range(2)] + [plain])
    return run.path


@pytest.mark.parametrize("out", ["out.jsonl", "out.parquet"])
def test_episodes_are_trained_on_from_a_file_as_from_the_run(played, call, tmp_path, tiny_tokenizer, out):
    _, stages = call(played, out=out)
    assert stages == [("source", 3, 0)]
    of_run, of_file = (load_traces(str(source), TEMPLATE) for source in (played, tmp_path / out))
    assert [e.response for e in of_run.examples] == [e.response for e in of_file.examples]
    assert [*of_run.graded.values()] == [*of_file.graded.values()] == 2 * [" <answer> 7 </answer>"]
    encoded = [encode_traces(t.examples, t.token_ids, tiny_tokenizer, append_eos=True) for t in (of_run, of_file)]
    assert encoded[0] == encoded[1]
    assert False in encoded[1][2][0]
    again, _ = call(tmp_path / out, out="again.jsonl", dedup=True)
    assert [len(row.get("turns", ())) for row in again] == [3, 0]
    of_copy = load_traces(str(tmp_path / "again.jsonl"), TEMPLATE)
    assert encode_traces(of_copy.examples, of_copy.token_ids, tiny_tokenizer, append_eos=True) == encoded[1]


def test_ids_of_turns_are_all_there_and_of_their_text(played, call, tmp_path, tiny_tokenizer):
    rows, _ = call(played)
    own = rows[0]["turns"]

    def traces(**changes):
        (tmp_path / "t.jsonl").write_text(json.dumps({**rows[0], **changes}))
        return load_traces(str(tmp_path / "t.jsonl"), TEMPLATE)

    for changes, problem in (
        ({"prompt_ids": None}, "it has ids of its turns, but not prompt_ids"),
        ({"turns": [own[0] | {"ids": None}, *own[1:]]}, "it has ids of its turns, but not of all of them"),
        ({"turns": [own[0] | {"ids": [-1]}, *own[1:]]}, "'ids' is not a list of token ids"),
    ):
        with pytest.raises(RlvrError, match=rf"t\.jsonl:1: {problem}"):
            traces(**changes)
    moved = traces(
        turns=[own[0] | {"ids": own[0]["ids"][:-1]}, own[1] | {"ids": [own[0]["ids"][-1], *own[1]["ids"]]}, own[2]]
    )
    assert len({t.fingerprint for t in (traces(), moved)}) == 2
    without_ids = [{"role": turn["role"], "text": turn["text"]} for turn in own]
    tokenized = traces(turns=without_ids)
    assert not tokenized.token_ids
    encode_traces(tokenized.examples, tokenized.token_ids, tiny_tokenizer, append_eos=True)
    changed = traces(turns=[own[0] | {"text": " 7+7=15,"}, *own[1:]])
    with pytest.raises(RlvrError, match="its token ids do not spell its text with this tokenizer"):
        encode_traces(changed.examples, changed.token_ids, tiny_tokenizer, append_eos=True)


def test_episodes_of_several_turns_are_no_pairs_nor_fused_and_the_error_says_what_takes_them(tmp_path, call):
    """Nor traces, in a run of an earlier version, which did not say where the texts of turns end."""
    for name, environment in (("e", "guess.py:Guess"), ("text", "")):
        with RunDir.create(
            tmp_path / "runs", "eval", name=name, metadata=FACTS | {"config": {"environment": environment}}
        ) as run:
            of = {"run_id": name, "prompt": TEMPLATE.fill("Q?")}
            rows = [an_episode(2, 1, 2, **of, sample_index=i, reward=float(i)) for i in range(2)]
            run.commit_rollouts("eval", 0, rows)
        for emit, hint in (
            ("pairs", OF_EPISODES),
            ("fused", "Episodes of several turns are not fused"),
            ("traces", "Loosen"),
        ):
            with pytest.raises(RlvrError, match="'whole' dropped the last 2") as raised:
                call(run.path, emit=emit)
            assert raised.value.hint.startswith(hint if environment else "Loosen the filter")


@pytest.mark.parametrize("emit", ["traces", "pairs"])
def test_an_episode_that_was_cut_off_is_no_text_to_learn_for_sft_and_dpo_and_in_a_file(tmp_path, call, emit):
    endings = ["policy", "environment", "turns", "error"]
    with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata=FACTS) as run:
        rows = [rollout("r", "q: 3 + 4?", i, f"{e} {RIGHT}", reward=float(i % 2)) for i, e in enumerate(endings)]
        of = an_episode(1).episode
        rows = [replace(r, episode=of._replace(ended_by=e)) for r, e in zip(rows, endings, strict=True)]
        run.commit_rollouts("train", 0, rows)
    rows, stages = call(run.path, emit=emit)
    assert stages[1] == ("whole", 2, 2)
    if emit == "traces":
        assert [r["response"] for r in rows] == [f"{e} {RIGHT}" for e in endings[:2]]
        assert [r["response"] for r in rows] == [e.response for e in load_traces(str(run.path), TEMPLATE).examples]
    else:
        pairs = load_pairs(str(run.path), TEMPLATE, pairs_per_question=4, seed=0).examples
        assert [r[name] for r in rows for name in ("chosen", "rejected")] == [e.response for e in pairs]
        assert len(rows) == 1


@pytest.mark.parametrize(
    ("flags", "kept", "stages"),
    [
        ({"correct_only": True}, "aAbcdf", [("correct", 6, 2)]),
        ({"where": "reward > 0.5 -- or so"}, "aAbcdf", [("where", 6, 2)]),
        ({"where": "num_response_tokens > (SELECT avg(num_response_tokens) FROM rollouts)"}, "", None),
        ({"dedup": True}, "abcdefh", [("dedup", 7, 1)]),
        ({"dedup": True, "where": "num_response_tokens < 9"}, "Abcdefh", [("dedup", 7, 1), ("where", 7, 0)]),
        ({"max_pass_rate": 0.5}, "defh", [("pass rate", 4, 4)]),  # half: 2 of its 4 samples, the cut one too
        ({"min_pass_rate": 0.5, "max_pass_rate": 0.5}, "def", [("pass rate", 3, 5)]),
        ({"max_per_question": 2, "shortest": True, "correct_only": True}, "bcdf", [("correct", 6, 2), ("per question", 4, 2)]),
        ({"limit": 3, "shortest": True}, "bce", [("limit", 3, 5)]),
        ({"phase": "eval"}, "x", None),
        ({"phase": "all"}, "xaAbcdefh", [("whole", 9, 2)]),
    ],
)  # fmt: skip
def test_each_filter(made, call, flags, kept, stages):
    if not kept:
        with pytest.raises(RlvrError, match="Nothing is left"):
            call(made, **flags)
        return
    rows, found = call(made, **flags)
    assert starts(rows) == kept
    if stages is not None:
        assert found[1 if ("whole", 9, 2) in stages else 2 :] == stages


@pytest.mark.parametrize(
    ("failing", "flags"),
    [
        ({"matches": False}, {"where": True}),
        ({"right": False}, {"correct_only": True}),
        ({"faults": frozenset({"code"})}, {"thinking": ThinkingRules(without_code=True)}),
        ({"question": "never right"}, {"min_pass_rate": 0.1}),
    ],
)
def test_of_duplicates_one_that_passes_is_kept(failing, flags):
    others = [Item(key, "q", right=True, digest="same") for key in ("passes", "later")]
    failing = replace(others[0], key="first", **failing)
    questions = {"q": Question("q", "q?", "7", "q?", n=2, right=1), "never right": Question("n", "q?", "9", "q?", n=2)}
    passed = select([failing, *others], questions, Selection(dedup=True, **flags))
    assert [item.key for item in passed.kept] == ["passes"]


PARAGRAPH = "so it is " * 4
THINKING = {  # its first letter is how a row is told
    "a": f"a is fine, $x^2$ \\frac too\n\n{PARAGRAPH}",
    "b": "b и по-русски",
    "c": "c has\n```python\nprint(7)\n```",
    "d": f"d is long {PARAGRAPH}\n{PARAGRAPH}",
    "e": f"e mixes 这是七这是七这是七 with\n```\n{PARAGRAPH}{PARAGRAPH}",
    "f": "f is one of many English words and one слово",
}
AFTER = f" {RIGHT} ```code``` и {PARAGRAPH * 9}"  # the answer is not looked at


@pytest.mark.parametrize(
    ("flags", "kept", "stages"),
    [
        ({"language": "en", "min_language_share": 0.8}, "acdf", [("language", 4, 2)]),
        ({"without_code": True}, "abdf", [("code", 4, 2)]),
        ({"max_paragraph_words": 20}, "abcf", [("paragraphs", 4, 2)]),
        (
            {"language": "en", "without_code": True, "max_paragraph_words": 20, "correct_only": True},
            "a",
            [("correct", 6, 0), ("language", 3, 3), ("paragraphs", 2, 1), ("code", 1, 1)],
        ),
    ],
)
def test_the_thinking_of_a_trace(flags, kept, stages, call, tmp_path):
    with RunDir.create(tmp_path / "runs", "eval", name="r", metadata=FACTS) as run:
        texts = [thinking + AFTER for thinking in THINKING.values()]
        run.commit_rollouts(
            "eval", 0, [rollout("r", "q: 3 + 4?", i, t, reward=1.0, phase="eval") for i, t in enumerate(texts)]
        )
    rows, found = call(run.path, **flags)
    assert starts(rows) == kept
    assert found[1:] == stages
    (tmp_path / "d [1].jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}?", "response": t, "answer": "7"}) + "\n" for i, t in enumerate(texts))
    )
    if "correct_only" not in flags:
        rows, found = call(tmp_path / "d [1].jsonl", out=str(tmp_path / "of-file.jsonl"), **flags)
        assert (starts(rows), found[1:]) == (kept, stages)


def test_the_rules_of_thinking_need_responses(call, tmp_path, capsys):
    (tmp_path / "none.jsonl").write_text('{"question": "Q", "answer": "7"}\n' * 2)
    with pytest.raises(RlvrError, match="has no responses: the rules of their thinking \\(language and code\\)"):
        call(tmp_path / "none.jsonl", language="en", without_code=True)
    rows = ['{"prompt": "Q", "answer": "7"}\n', '{"prompt": "Q", "answer": "7", "response": "это"}\n']
    (tmp_path / "some.jsonl").write_text("".join(rows))
    flags = {"source": (str(tmp_path / "some.jsonl"),), "out": str(tmp_path / "o.jsonl"), "language": "en"}
    filter_run(resolve(FilterConfig, flags=flags, command="filter"))
    assert len(rows_of(tmp_path / "o.jsonl")) == 1
    assert "1 of 2 rows have no response; the rules of the thinking (language) keep them" in capsys.readouterr().err


def test_random_choices_are_a_function_of_the_seed(made, call):
    first, _ = call(made, limit=4)
    same, _ = call(made, limit=4, overwrite=True)
    assert first == same
    others = [call(made, limit=4, seed=seed, overwrite=True)[0] for seed in (1, 2)]
    assert any(starts(rows) != starts(first) for rows in others)
    for rows in [first, *others]:
        assert len(rows) == 4
        assert [r["id"] for r in rows] == sorted((r["id"] for r in rows), key=lambda i: int(i.rsplit("/")[-1]))
    one, _ = call(made, max_per_question=1, overwrite=True)
    assert [r["question"][:4] for r in one] == ["easy", "half", "hard"]


def test_questions_with_their_difficulty(made, call):
    rows, stages = call(made, emit="questions")
    assert rows == [
        {"id": "easy:", "question": "easy: 3 + 4?", "ground_truth": "7", "pass_rate": 1.0, "n": 4},
        {"id": "half:", "question": "half: 5 + 2?", "ground_truth": "7", "pass_rate": 0.5, "n": 4},
        {"id": "hard:", "question": "hard: 8 - 1?", "ground_truth": "7", "pass_rate": 0.0, "n": 2},
    ]
    assert stages == [("source", 3, 0)]
    rows, stages = call(made, emit="questions", max_pass_rate=0.9, correct_only=True, overwrite=True)
    assert [r["id"] for r in rows] == ["half:"]
    assert stages == [("source", 3, 0), ("correct", 2, 1), ("pass rate", 1, 1)]
    rows, _ = call(made, emit="questions", where="num_response_tokens = 2", overwrite=True)
    assert [r["id"] for r in rows] == ["half:"]
    with pytest.raises(RlvrError, match="Nothing is left"):  # no sample is both
        call(made, emit="questions", where="num_response_tokens = 2", correct_only=True, overwrite=True)


def test_several_runs(made, call, tmp_path):
    with RunDir.create(tmp_path / "runs", "eval", name="s", metadata=FACTS) as run:
        rows = [rollout("s", "easy: 3 + 4?", 0, f"z {WRONG}", reward=0.0, phase="eval")]
        rows.append(rollout("s", "easy: 9 - 2?", 0, f"y {RIGHT}", reward=1.0, phase="eval", step=0))
        run.commit_rollouts("eval", 0, [rows[0]])
        run.commit_rollouts(
            "eval", 1, [rollout("s", "easy: 9 - 2?", 0, f"y {RIGHT}", reward=1.0, phase="eval", step=1)]
        )
    rows, _ = call(("r", "s"), phase="all", emit="questions")
    assert [(r["id"], r["question"], r["pass_rate"], r["n"]) for r in rows][1:] == [
        ("easy:", "easy: 3 + 4?", 0.8, 5),  # of both runs
        ("half:", "half: 5 + 2?", 0.5, 4),
        ("hard:", "hard: 8 - 1?", 0.0, 2),
        ("easy:-2", "easy: 9 - 2?", 1.0, 1),  # another question of that id
    ]
    assert load_dataset(str(tmp_path / "out.jsonl")).rows == 5
    rows, _ = call((made, "s", "r"), phase="all", overwrite=True)  # one of them twice
    assert starts(rows) == "xaAbcdefhzy"
    assert len({r["id"] for r in rows}) == len(rows)
    assert call("*", phase="all", overwrite=True)[0] == call(("r", "s"), phase="all", overwrite=True)[0]
    with pytest.raises(RlvrError, match="s has no train rollouts"):
        call(("r", "s"), overwrite=True)
    rows, _ = call((made, shutil.copytree(made, tmp_path / "old/r")), phase="all", overwrite=True)
    assert {r["run"] for r in rows} == {"runs/r", "old/r"}
    assert len({r["id"] for r in rows}) == len(rows)


@pytest.mark.parametrize("runs", [("r", "s"), slow(("s", "r"))])
def test_a_question_that_two_prompts_asked_counts_with_the_samples_of_both(made, call, tmp_path, runs):
    other = replace(rollout("s", "half: 5 + 2?", 0, f"z {RIGHT}", reward=1.0, step=3), prompt="HALF:  5 + 2?")
    facts = {"facts": {**FACTS["facts"], "prompt": {"name": "question_only", "text": "{question}"}}}
    with RunDir.create(tmp_path / "runs", "eval", name="s", metadata=facts) as run:
        run.commit_rollouts(
            "train", 3, [other, replace(other, sample_index=1, prompt="hard: 8 - 1?", example_id="hard:")]
        )
    rows, stages = call(runs, emit="questions", dedup=True, min_pass_rate=0.2, max_pass_rate=0.7)
    assert {r["question"].casefold().split(":")[0]: (r["pass_rate"], r["n"]) for r in rows} == {
        "half": (0.6, 5),
        "hard": (1 / 3, 3),
    }
    assert stages == [("source", 5, 0), ("dedup", 3, 2), ("pass rate", 2, 1)]
    rows, _ = call(runs, emit="questions", dedup=True, correct_only=True, overwrite=True)
    assert len(rows) == 3
    rows, _ = call(runs, emit="questions", correct_only=True, overwrite=True)
    assert len(rows) == 5, "hard was right with one of its prompts"
    rows, _ = call(runs, emit="questions", overwrite=True)
    assert sorted((r["question"].casefold().split(":")[0], r["pass_rate"], r["n"]) for r in rows) == [
        ("easy", 1.0, 4), *[("half", 0.6, 5)] * 2, *[("hard", 1 / 3, 3)] * 2
    ]  # fmt: skip
    rows, _ = call(runs, max_per_question=1, overwrite=True)
    assert sorted(r["question"].casefold().split(":")[0] for r in rows) == ["easy", "half", "hard"]


def test_questions_of_one_text_may_have_different_truths(call, tmp_path):
    with RunDir.create(tmp_path / "runs", "eval", name="r", metadata=FACTS) as run:
        graded = [("e1", "9", {"9": 1.0, "7": 0.0, "nine": 1.0, "5": 0.0}), ("e2", "7", {"9": 0.0, "7": 1.0})]
        rows = [
            replace(rollout("r", "q: ?", i, response, reward=reward, phase="eval"), example_id=name, ground_truth=truth)
            for name, truth, rewards in graded
            for i, (response, reward) in enumerate(rewards.items())
        ]
        run.commit_rollouts("eval", 0, rows)
    questions, _ = call(run.path, emit="questions")
    assert [(r["id"], r["ground_truth"], r["pass_rate"], r["n"]) for r in questions] == [
        ("e1", "9", 0.5, 4),
        ("e2", "7", 0.5, 2),
    ]
    pairs, _ = call(run.path, emit="pairs", out="pairs.jsonl")
    assert [(r["chosen"], r["rejected"], r["ground_truth"]) for r in pairs] == [("nine", "5", "9")]
    assert call(run.path, emit="pairs", dedup=True, out="dedup.jsonl")[0] == pairs
    with RunDir.create(tmp_path / "runs", "eval", name="spaced", metadata=FACTS) as spaced:
        graded = [("is  Seven", 1.0), ("is seven", 0.0), ("SIX", None), ("six", 0.0), ("7", 1.0)]
        rows = [
            rollout("spaced", "q: ?", i, text, reward=reward, phase="eval") for i, (text, reward) in enumerate(graded)
        ]
        spaced.commit_rollouts("eval", 0, rows)
    cases, stages = call(spaced.path, emit="pairs", dedup=True, overwrite=True)
    assert [(r["chosen"], r["rejected"]) for r in cases] == [("7", "six")]
    assert stages[1:] == [("dedup", 2, 3), ("pairs", 1, 0)]
    for spec in (run.path, tmp_path / "pairs.jsonl"):
        loaded = load_pairs(str(spec), TEMPLATE, pairs_per_question=4, seed=0).examples
        assert [e.response for e in loaded] == ["nine", "5"]


def test_the_control_is_as_large_and_from_the_same_source(made, call, tmp_path):
    everything, _ = call(made, dedup=True, out="all.jsonl")
    draws = set()
    for seed in range(3):
        rows, _ = call(made, correct_only=True, dedup=True, with_control=True, seed=seed, overwrite=True)
        control = rows_of(tmp_path / "out-control.jsonl")
        assert len(control) == len(rows) == 5
        assert all(r in everything for r in control)
        draws.add(starts(control))
    assert len(draws) > 1
    assert any(set(d) & set("eh") for d in draws)  # wrong ones too


def test_the_provenance(made, call, tmp_path):
    call(made, correct_only=True, with_control=True, out="o.jsonl")
    meta = json.loads((tmp_path / "o.jsonl.meta.json").read_text())
    assert meta["sha256"] == hashlib.sha256((tmp_path / "o.jsonl").read_bytes()).hexdigest()
    assert meta["control"]["sha256"] == hashlib.sha256((tmp_path / "o-control.jsonl").read_bytes()).hexdigest()
    assert (meta["file"], meta["rows"], meta["control"]["rows"]) == ("o.jsonl", 6, 6)
    (source,) = meta["sources"]
    assert (source["run"], source["phase"], source["grader"]) == ("r", "train", "r1_zero")
    assert source["rollouts_fingerprint"] == read_run(made).fingerprint
    assert meta["options"]["correct_only"] is True
    assert meta["stages"][-1] == {"name": "correct", "kept": 6, "dropped": 2, "why": "not rewarded"}
    assert meta["rlvr_version"]


def test_nothing_is_overwritten_unasked(made, call, tmp_path):
    for name in ("out.jsonl", "out-control.jsonl", "out.jsonl.meta.json"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(RlvrError, match=f"{name} exists already"):
            call(made, with_control=True)
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(RlvrError, match="Nothing is left"):
        call(made, where="false", overwrite=True)
    assert (tmp_path / "out.jsonl").read_text() == "mine"
    assert len(call(made, overwrite=True)[0]) == 8
    assert not list(tmp_path.glob("*.tmp"))


def test_where_nothing_can_be_written_nothing_is_read(made, call, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out, reason in (("nowhere/o.jsonl", "No such file or directory"), ("file/o.jsonl", "Not a directory")):
        with pytest.raises(RlvrError, match=f"Cannot write .*{out}: {reason}"):
            call(made, out=out)
        with pytest.raises(RlvrError, match=f"Cannot write .*{out}: {reason}"):
            call("missing.jsonl", out=out)
        assert capsys.readouterr().out == ""


def test_sft_takes_the_traces_and_grpo_the_questions(made, call, tmp_path, capsys):
    from rlvr_cli.commands import grpo, sft

    call(made, out="t.parquet")
    traces = load_traces(str(tmp_path / "t.parquet"), TEMPLATE)
    assert [(e.prompt, e.response, e.ground_truth) for e in traces.examples] == [
        (TEMPLATE.fill(ROWS[i][0]), ROWS[i][1], "7") for i in (0, 1, 2, 3, 4, 5, 6, 8)
    ]
    flags = {"dataset": str(tmp_path / "t.parquet"), "correct_only": True, "dry_run": True}
    sft.run(resolve(SftConfig, flags=flags, command="sft"))
    assert "6 of 8 traces" in capsys.readouterr().err
    call(made, out="q.jsonl", emit="questions")
    questions = load_dataset(str(tmp_path / "q.jsonl"), purpose="train").examples
    assert [(e.id, e.question, e.ground_truth) for e in questions] == [
        (q.split()[0], q, "7") for q in dict.fromkeys(row[0] for row in ROWS)
    ]
    flags = {"dataset": str(tmp_path / "q.jsonl"), "rollout_batch_size": 8, "train_batch_size": 8, "group_size": 4}
    flags |= {"gradient_accumulation_steps": 1, "dry_run": True, "runs_dir": str(tmp_path)}
    grpo.run(resolve(GrpoConfig, flags=flags, command="grpo"))
    assert "3 of " in capsys.readouterr().err


def test_a_run_without_its_template_gives_traces_alone(tmp_path, call):
    with RunDir.create(tmp_path / "runs", "eval", name="r", metadata={}) as run:
        run.commit_rollouts(
            "eval", 0, [rollout("r", "q: 1?", i, f"{i} {RIGHT}", reward=1.0, phase="eval") for i in range(2)]
        )
    rows, _ = call(run.path)
    assert "question" not in rows[0]
    assert len(load_traces(str(tmp_path / "out.jsonl"), TEMPLATE).examples) == 2
    for flags in ({"emit": "questions"}, {"decontaminate_against": ("arithmetic:5",)}):
        with pytest.raises(RlvrError, match="1 of 1 questions cannot be extracted from their prompts"):
            call(run.path, out="other.jsonl", **flags)


@pytest.mark.parametrize("own_prompt", [True, None])
def test_prompts_of_an_environment_are_no_questions(tmp_path, call, own_prompt):
    """Each was drawn from its seed; a run of an earlier version does not tell it, but has several for a question."""
    facts = FACTS["facts"] | {"environment": {"name": "mine.py:Draws"}}
    with RunDir.create(tmp_path / "runs", "eval", name="r", metadata={"facts": facts}) as run:
        rows = [rollout("r", "q: 1?", i, f"{i} {RIGHT}", reward=float(i % 2), phase="eval") for i in range(4)]
        rows = [replace(row, episode=an_episode(10).episode, own_prompt=own_prompt) for row in rows]
        rows = [replace(row, prompt=TEMPLATE.fill(f"drawn {i // 2}")) for i, row in enumerate(rows)]
        run.commit_rollouts(
            "eval", 0, [replace(row, response_ids=(2,) * 10, sampled_logprobs=(-1.0,) * 10) for row in rows]
        )
    for emit in ("traces", "pairs"):
        rows, _ = call(run.path, emit=emit, out=f"{emit}.jsonl")
        assert "question" not in rows[0]
        assert {row["prompt"] for row in rows} == {TEMPLATE.fill(f"drawn {i}") for i in range(2)}
    for flags in ({"emit": "questions"}, {"decontaminate_against": ("arithmetic:5",)}):
        with pytest.raises(RlvrError, match=r"The environment mine\.py:Draws of r gave 2 of the prompts") as raised:
            call(run.path, out="other.jsonl", **flags)
        assert "in its dataset d" in raised.value.hint


def test_questions_of_two_files_may_have_one_id(tmp_path, call):
    """The rows of an earlier version do not say whether an environment gave the prompt."""
    facts = FACTS["facts"] | {"environment": {"name": "mine.py:Answers"}}
    with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata={"facts": facts}) as run:
        for phase, question in (("train", "1?"), ("eval", "2?")):
            row = replace(rollout("r", question, 0, RIGHT, reward=1.0, phase=phase), example_id="data-1")
            row = replace(row, episode=an_episode(10).episode, response_ids=(2,) * 10, sampled_logprobs=(-1.0,) * 10)
            run.commit_rollouts(phase, row.step, [row])
    rows, _ = call(run.path, emit="questions", phase="all")
    assert sorted(row["question"] for row in rows) == ["1?", "2?"]


def test_a_question_that_was_asked_with_shots_is_written_without_them(tmp_path, call):
    facts = {"prompt": {"name": "p", "text": "Q: {question}\nA:"}, "dataset": {"shots": {"count": 2}}}
    prompt = "Q: 1\nA: 2\n\nQ: 3\nA: 4\n\nQ: 5\nA:"
    with RunDir.create(tmp_path / "runs", "eval", name="r", metadata={"facts": facts}) as run:
        run.commit_rollouts("eval", 0, [a_rollout(run_id="r", phase="eval", step=0, prompt=prompt, response="6")])
    rows, _ = call(run.path, emit="questions")
    assert [row["question"] for row in rows] == ["5"]


def test_questions_of_older_runs_that_cannot_be_told_from_their_shots_have_them(tmp_path, call, capsys):
    facts = {"prompt": {"name": "p", "text": "{question}"}, "dataset": {"shots": {"count": 2}}}
    plain, lines = "1 2\n\n3 4\n\n5", "1 2\n\n3 4\n\n6\n\nmore"
    with RunDir.create(tmp_path / "runs", "eval", name="r", metadata={"facts": facts}) as run:
        rows = [
            a_rollout(run_id="r", phase="eval", step=0, example_id=str(i), prompt=prompt)
            for i, prompt in enumerate((plain, lines))
        ]
        run.commit_rollouts("eval", 0, rows)
    rows, _ = call(run.path, emit="questions")
    assert sorted(row["question"] for row in rows) == [lines, "5"]
    filter_run(FilterConfig(source=(str(run.path),), out=str(tmp_path / "again.jsonl"), emit="questions"))
    assert "note: 1 of 2 questions cannot be told from the shots before them" in capsys.readouterr().err


def write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def test_a_dataset(tmp_path, call):
    rows = [
        {"id": "1", "question": "What is 3 + 4?", "answer": "7"},
        {"id": "2", "question": "what is  3 + 4?", "answer": "7"},
        {"id": "3", "question": "What is 3 - 4?", "answer": "-1"},
        {"id": "4", "question": "Long ago?", "answer": "9"},
    ]
    source = write(tmp_path / "d.jsonl", rows)
    found, stages = call(source, dedup=True, where="id <> '4' AND length(ground_truth) < 3")
    assert found == [
        {"id": "1", "question": "What is 3 + 4?", "ground_truth": "7"},
        {"id": "3", "question": "What is 3 - 4?", "ground_truth": "-1"},
    ]
    assert stages == [("source", 4, 0), ("dedup", 3, 1), ("where", 2, 1)]
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert meta["sources"][0]["fingerprint"] == load_dataset(source, purpose="train").fingerprint
    assert load_dataset(str(tmp_path / "out.jsonl"), purpose="train").rows == 2
    found, _ = call("arithmetic:50", limit=10, out="a.jsonl")
    assert len(found) == 10


def test_bad_lines_of_each_dataset_are_skipped_and_counted_where_that_is_asked_for(tmp_path, call, capsys):
    rows = [{"question": q, "answer": "7"} for q in ("What is 3 + 4?", "What is 5 + 2?")]
    source, held_out = write(tmp_path / "d.jsonl", [*rows, {"a": 1}]), write(tmp_path / "h.jsonl", [rows[0], {"a": 1}])
    with pytest.raises(RlvrError) as raised:
        call(source, emit="questions")
    assert raised.value.hint.endswith("To leave such rows out: --skip-bad-lines")
    given = {"decontaminate_against": (held_out,), "out": str(tmp_path / "out.jsonl"), "skip_bad_lines": True}
    capsys.readouterr()
    filter_run(resolve(FilterConfig, flags={"source": (source,), **given}, command="filter"))
    said = capsys.readouterr().err
    assert [row["question"] for row in rows_of(tmp_path / "out.jsonl")] == ["What is 5 + 2?"]
    assert said.count("skipped 1 bad line:") == 2
    assert f"{source}:3: " in said
    assert f"{held_out}:2: " in said


def test_responses_of_a_dataset_stay(tmp_path, call):
    rows = [{"prompt": "P", "response": r, "ground_truth": "1"} for r in (" a", " A", " b")]
    found, stages = call(write(tmp_path / "d.jsonl", rows), dedup=True)
    assert [(r["prompt"], r["response"]) for r in found] == [("P", " a"), ("P", " b")]
    assert "question" not in found[0]
    assert stages[-1] == ("dedup", 2, 1)
    assert len(load_traces(str(tmp_path / "out.jsonl"), TEMPLATE).examples) == 2


CALL = {"function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    "row",
    [
        {"question": "3 + 4?", "answer": "3+4=<<3+4=7>>7\n#### 7"},
        {"problem": "3 + 4?", "answer": "7", "solution": r"so \boxed{7} it is"},
        {"question": "3 + 4?", "options": ["7", "#### 8"], "answer": "A"},
        {"prompt": "P", "answer": "7", "turns": [{"role": "policy", "text": "a"}, {"role": "tool", "text": "b"}]},
        {"prompt": "P", "answer": "7", "turns": [], "messages": 5, "response": "c"},
        {
            "question": "3 + 4?",
            "answer": "7",
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "tool_calls": [CALL], "content": None},
            ],
            "tools": [{"function": {"name": "add", "n": 2}}],
        },
    ],
)
def test_sft_reads_of_a_filtered_dataset_what_it_reads_of_the_dataset(row, suffix, tmp_path, call):
    source = write(tmp_path / "d.jsonl", [row, row])
    if "tools" in row and suffix == ".parquet":
        with pytest.raises(RlvrError, match="has tools"):
            call(source, out=f"kept{suffix}")
        return
    call(source, out=f"kept{suffix}")
    before, after = (load_dataset(str(path), purpose="traces") for path in (source, tmp_path / f"kept{suffix}"))
    assert after.rows == 2
    assert after.fingerprint == before.fingerprint
    assert [(e.turns, e.conversation) for e in after.examples] == [(e.turns, e.conversation) for e in before.examples]


TURNS = [{"role": "policy", "text": "a"}, {"role": "tool", "text": "b"}]
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "c"}]


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        ("multiplication:3", {}),
        ([{"problem": "3 + 4?", "solution": r"so \boxed{7}", "answer": "7"}] * 2, {"answer_field": "answer"}),
        ([{"prompt": "3 + 4?", "answer": "7", "turns": TURNS}], {"question_field": "prompt"}),
        (
            [
                {"question": "a?", "answer": "7", "prompt": "P", "turns": TURNS},
                {"question": "b?", "answer": "7", "response": "c"},
                {"question": "c?", "answer": "7", "messages": MESSAGES},
            ],
            {},
        ),
        (
            [
                {"question": "a?", "options": ["7", "8"], "answer": "A"},
                {"question": "b?", "options": None, "answer": "3 and 4 is\n#### 7"},
            ],
            {},
        ),
    ],
)  # fmt: skip
def test_a_filtered_dataset_is_trained_on_without_the_options_that_it_was_read_with(source, fields, tmp_path, call):
    source = write(tmp_path / "d.jsonl", source) if isinstance(source, list) else source
    call(source, out="kept.parquet", **fields)
    before = load_dataset(source, purpose="traces", **fields)
    after = load_dataset(str(tmp_path / "kept.parquet"), purpose="traces")
    assert after.fingerprint == before.fingerprint
    assert [(e.turns, e.conversation) for e in after.examples] == [(e.turns, e.conversation) for e in before.examples]
    assert all(e.response or e.solution for e in after.examples)


def test_messages_may_have_fields_that_are_no_json(tmp_path, call):
    messages = [message | {"at": datetime(2026, 1, 1), "raw": b"x"} for message in MESSAGES]
    columns = {"question": ["q"], "answer": ["7"], "messages": [messages]}
    pq.write_table(pa.table(columns), tmp_path / "d.parquet")
    ((row,), _) = call(tmp_path / "d.parquet")
    assert row["messages"][0] == MESSAGES[0] | {"at": "2026-01-01 00:00:00", "raw": "b'x'"}


def test_decontamination(tmp_path, call):
    words = "A train leaves the station at noon and goes at sixty miles an hour to the north for two hours".split()
    evaluation = [
        {"question": "What is 3 + 4?", "answer": "7"},
        {"question": " ".join(words) + ": how far?", "answer": "120"},
    ]
    rows = [
        ("equal", "WHAT is\n3 + 4?"),
        ("another sign", "What is 3 - 4?"),
        ("thirteen", "Long ago, " + " ".join(words[2:15]) + ", so they say."),
        ("twelve", "Long ago, " + " ".join(words[2:14]) + " so they say."),
        ("none", "How many?"),
    ]
    source = write(tmp_path / "d.jsonl", [{"id": i, "question": q, "answer": "1"} for i, q in rows])
    against = (write(tmp_path / "e.jsonl", evaluation),)
    found, stages = call(source, decontaminate_against=against)
    assert [r["id"] for r in found] == ["another sign", "twelve", "none"]
    assert stages[-1] == ("decontaminate", 3, 2)
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert (
        meta["stages"][-1]["why"]
        == "1 equal to one of the evaluation; 1 with 13 words in common with one of the evaluation"
    )
    found, _ = call(source, decontaminate_against=against, ngram=12, overwrite=True)
    assert [r["id"] for r in found] == ["another sign", "none"]


@pytest.mark.parametrize("name", ["r1_zero", "alpaca"])
def test_decontamination_of_formatted_prompts_compares_the_questions_in_them(name, tmp_path, call):
    template = load_prompt(name)
    answer = {"response": RIGHT, "ground_truth": "7"}
    rows = [{"id": q, "prompt": template.fill(q), **answer} for q in ("What is 3 + 4?", "What is 9 - 2?")]
    source = write(tmp_path / "d.jsonl", rows)
    for number, evaluated in enumerate(({"question": "what is 3+4?", "answer": "7"}, rows[0])):
        against = (write(tmp_path / f"e{number}.jsonl", [evaluated]),)
        found, stages = call(source, decontaminate_against=against, out=f"o{number}.jsonl")
        assert [r["id"] for r in found] == ["What is 9 - 2?"]
        assert stages[-1] == ("decontaminate", 1, 1)


@pytest.mark.parametrize("field", ["prompt", "Prompt"])
def test_a_question_in_a_prompt_of_an_unknown_template_is_asked_for(field, tmp_path, call):
    rows = [{field: f"Please: {q}", "response": "7", "answer": "7"} for q in ("3 + 4?", "9 - 2?")]
    formatted = write(tmp_path / "d.jsonl", rows)
    known = write(tmp_path / "q.jsonl", [{**row, "question": row[field]} for row in rows])
    for source, against in ((formatted, known), (known, formatted)):
        with pytest.raises(RlvrError, match=r"d\.jsonl: 2 of 2 rows have a formatted prompt and no question") as raised:
            call(source, decontaminate_against=(against,))
        assert "Add a field question" in raised.value.hint
        assert ("--question-field prompt" in raised.value.hint) == (source == formatted)
    with pytest.raises(RlvrError, match="the stage 'decontaminate' dropped the last 2"):
        call(known, decontaminate_against=(known,))


@pytest.mark.parametrize(
    ("evaluated", "same", "other"),
    [
        (
            "What is 12 + 30?",
            [
                "What is 12 + 30",
                "what is 12+30?",
                "What is: 12 +30 ?!",
                "**What is** $12 + 30$.",
                "What is １２＋３０?",
            ],
            ["What is 12 - 30?", "What is 1 + 230?", "What is 1230?", "What is 12 30?", "What is 12 + 3 0?"],
        ),
        (
            "Find $x^2 + 1$ when $x = 2$.",
            ["Find $x^2+1$ when $x=2$.", "Find x^2 + 1, when x = 2", r"Find \(x^2+1\) when \(x=2\)!"],
            ["Find $x^2 - 1$ when $x = 2$.", "Find $x^{21}$ when $x = 2$."],
        ),
        ("Halve 1,234.", ["halve 1234"], ["halve 1.234", "halve 1 234"]),
        ("12 − 5 × 2?", ["12-5*2"], ["12+5*2"]),
        ("数学は 3 ÷ 4", ["数学は3/4"], ["数学は34"]),
        ("?", ["?"], ["!", ""]),
    ],
)
def test_short_questions_are_equal_by_letters_numbers_and_signs(evaluated, same, other):
    questions = {text: Question(text, text, "1", normalized(text)) for text in [evaluated, *same, *other]}
    assert list(find_contaminated(questions, [evaluated], ngram=13)) == list(dict.fromkeys([evaluated, *same]))


def test_rollouts_are_decontaminated_by_their_questions(made, call, tmp_path):
    against = (write(tmp_path / "e.jsonl", [{"question": "HALF:  5 + 2?", "answer": "7"}]),)
    rows, stages = call(made, decontaminate_against=against, with_control=True)
    assert starts(rows) == "aAbch"
    assert stages[-1] == ("decontaminate", 5, 3)
    assert not set(starts(rows_of(tmp_path / "out-control.jsonl"))) & set("def")  # nor does the control have them


def test_contamination_finds_every_planted_run_of_words():
    generator = random.Random(0)
    vocabulary = [f"w{i}" for i in range(5000)]
    evaluation = [" ".join(generator.sample(vocabulary, 40)) for _ in range(50)]
    questions = {}
    for i in range(100):
        words = [f"x{generator.randrange(5000)}" for _ in range(30)]
        if i % 2:
            source = generator.choice(evaluation).split()
            at, there = generator.choice([0, 5, 27]), generator.choice([0, 7, 30])
            words[there:there] = [w.upper() + "," for w in source[at : at + 13]]
        text = " ".join(words)
        questions[str(i)] = Question(str(i), text, "1", normalized(text))
    assert set(find_contaminated(questions, evaluation, ngram=13)) == {str(i) for i in range(1, 100, 2)}


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"where": "reward ="}, "syntax error"),
        ({"where": "reward"}, "The condition is DOUBLE"),
        ({"where": "true); SELECT (true"}, "syntax error"),
        ({"where": "EXISTS (FROM read_text('/etc/passwd'))"}, "read_text is not allowed in queries"),
        ({"where": "true, false"}, "not true or false"),
        ({"where": "reward = $limit"}, "has a parameter"),
        slow({"where": "rewrad = 1"}, 'Referenced column "rewrad" not found'),
        slow({"where": "avg(reward) > 0"}, "cannot contain aggregates"),
        slow({"where": "true) OR (SELECT true"}, "syntax error"),
        slow({"where": "(WITH a AS (COPY (SELECT 1) TO '/tmp/x') SELECT true)"}, "COPY inside"),
        slow({"where": "*"}, "STAR expression"),
        ({"step": 9}, "r has no train rollouts of step 9"),
        ({"limit": 0}, "--limit is 0"),
        ({"min_pass_rate": 0.5, "max_pass_rate": 0.2}, "not a valid range"),
        ({"emit": "questions", "shortest": True}, "--emit questions writes none"),
        (
            {"emit": "questions", "without_code": True},
            "--without-code selects responses, but --emit questions writes none",
        ),
        ({"min_language_share": 0.5}, "--min-language-share needs --language"),
        ({"language": "xx"}, "--language is 'xx'"),
        ({"decontaminate_against": ("nowhere.jsonl",)}, "There is no file nowhere.jsonl"),
        ({"shortest": True}, "--shortest has no effect"),
        ({"ngram": 8}, "--ngram has no effect without --decontaminate-against"),
        ({"pairs_per_question": 2}, "--pairs-per-question has no effect without --emit pairs"),
        ({"split": "test"}, "--split is an option of datasets, and "),
        ({"answer_field": "solution"}, "--answer-field is an option of datasets, and "),
        ({"skip_bad_lines": True}, "--skip-bad-lines is an option of datasets, and "),
        ({"out": "x.txt"}, "has an unknown file type"),
        ({"out": ""}, "--out is missing"),
        ({"source": ()}, "needs a run or a dataset"),
        ({"source": ("nowhere",)}, "There is no run 'nowhere' in "),
        ({"source": ("r", "nowhere")}, "There is no run 'nowhere'"),
        ({"source": ("arithmetic:5", "countdown:5")}, "several datasets"),
        ({"source": ("arithmetic:5",), "correct_only": True}, "--correct-only needs sampled responses"),
        ({"source": ("arithmetic:5",), "where": "reward = 1"}, 'Referenced column "reward" not found'),
    ],
)
def test_what_the_user_can_put_right(made, tmp_path, flags, problem):
    given = {"source": (str(made),), "out": str(tmp_path / "out.jsonl"), "runs_dir": str(tmp_path / "runs"), **flags}
    with pytest.raises(RlvrError) as caught:
        filter_run(resolve(FilterConfig, flags=given, command="filter"))
    assert problem in caught.value.problem
    assert not list(tmp_path.glob("out*"))


def test_a_missing_directory_is_two_lines_and_no_traceback(made, forks):
    done = forks.run("filter", made, "--out", made / "no" / "x.jsonl", cwd=made, status=1)
    assert done.err.startswith("error: Cannot write")


def test_filtering_leaves_the_run_as_it_is(made, call):
    before = {p: p.read_bytes() for p in made.rglob("*") if p.is_file()}
    call(made, correct_only=True, dedup=True, with_control=True)
    assert {p: p.read_bytes() for p in made.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    "fault",
    [
        "renamed:2",
        *map(slow, ("write.torn:3", "write:2", "write:3", "rename:1", "renamed:1", "renamed:3")),
    ],
)
def test_no_output_is_without_its_meta(made, call, tmp_path, monkeypatch, fault):
    """Wherever it stops: the data that are there are those that the meta describes, and the next call needs no --overwrite."""
    out, control, meta = (tmp_path / n for n in ("out.jsonl", "out-control.jsonl", "out.jsonl.meta.json"))
    monkeypatch.setenv("RLVR_FAULT", f"{fault}:enospc")
    with pytest.raises(RlvrError, match="No space left"):
        call(made, correct_only=True, with_control=True)
    monkeypatch.delenv("RLVR_FAULT")
    assert not list(tmp_path.glob(".*.tmp"))
    assert meta.exists() or not (out.exists() or control.exists())
    if not out.exists():
        call(made, correct_only=True, with_control=True)
    described = json.loads(meta.read_text())
    assert hashlib.sha256(out.read_bytes()).hexdigest() == described["sha256"]
    assert hashlib.sha256(control.read_bytes()).hexdigest() == described["control"]["sha256"]


def test_pairs_are_right_and_wrong_responses_to_one_question(made, call, tmp_path):
    rows, stages = call(made, emit="pairs")
    assert [(r["question"], r["chosen"], r["rejected"]) for r in sorted(rows, key=lambda r: r["chosen"])] == [
        ("half: 5 + 2?", f"d {RIGHT}", f"e {WRONG}"),
        ("half: 5 + 2?", f"f {RIGHT}", f"e {WRONG}"),
    ]
    assert stages == [("source", 10, 0), ("whole", 8, 2), ("pairs", 2, 0)]
    row = next(r for r in rows if r["chosen"].startswith("d"))
    assert (row["prompt"], row["ground_truth"]) == (TEMPLATE.fill("half: 5 + 2?"), "7")
    assert (row["chosen_id"], row["rejected_id"]) == ("r/train/3/half:/4", "r/train/3/half:/5")
    assert (row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]) == ([1], [2], [2])
    assert len(call(made, emit="pairs", pairs_per_question=1, out="one.jsonl")[0]) == 1
    assert load_pairs(str(tmp_path / "out.jsonl"), TEMPLATE, pairs_per_question=1, seed=0).examples[0].response
    parquet = call(made, emit="pairs", out="out.parquet")
    assert parquet[1] == stages
    again = load_pairs(str(tmp_path / "out.parquet"), TEMPLATE, pairs_per_question=1, seed=0)
    assert (
        again.fingerprint == load_pairs(str(tmp_path / "out.jsonl"), TEMPLATE, pairs_per_question=1, seed=0).fingerprint
    )


def test_a_curriculum_begins_with_what_is_easy(made, call):
    rates = {r["id"]: r["pass_rate"] for r in call(made, emit="questions")[0]}
    rows, _ = call(made, emit="questions", order="easy_first", overwrite=True)
    assert [r["pass_rate"] for r in rows] == sorted(rates.values(), reverse=True)
    assert {r["id"]: r["pass_rate"] for r in rows} == rates
    with RunDir.create(made.parent, "grpo", name="hard", metadata=FACTS) as run:
        again = [rollout("hard", q, i, text, reward=r) for i, (q, text, r, _, _) in enumerate(reversed(ROWS))]
        run.commit_rollouts("train", 0, again)
    assert [r["id"] for r in call(run.path, emit="questions", order="easy_first", overwrite=True)[0]] == [
        "easy:",
        "half:",
        "hard:",
    ]
    with pytest.raises(RlvrError, match="--order easy_first and --emit traces exclude each other"):
        call(made, order="easy_first", out="other.jsonl")


def test_fused_rows_are_both_forms_of_each_trace(made, call, tmp_path, capsys):
    rows, stages = call(made, emit="fused", correct_only=True, dedup=True)
    assert stages[-1] == ("fused", 7, 0), "five that think, and two questions without thinking"
    assert [(r["question"], r["response"]) for r in rows[:2]] == [
        ("easy: 3 + 4? /think", "<think>\na\n</think>\n\n<answer> 7 </answer>"),
        ("easy: 3 + 4? /no_think", "<think>\n\n</think>\n\n<answer> 7 </answer>"),
    ]
    assert "prompt" not in rows[0]
    assert len({r["id"] for r in rows}) == 7
    traces = load_traces(str(tmp_path / "out.jsonl"), load_prompt("question_only"))
    assert [(e.prompt, e.response) for e in traces.examples] == [(r["question"], r["response"]) for r in rows]
    with pytest.raises(RlvrError, match="with-control and --emit fused exclude each other"):
        call(made, emit="fused", with_control=True, out="other.jsonl")
    (tmp_path / "data.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    with pytest.raises(RlvrError, match="--emit fused needs sampled responses"):
        call(tmp_path / "data.jsonl", emit="fused", out="other.jsonl")


def test_traces_are_not_held_to_make_both_forms():
    class Trace(dict):
        __hash__ = object.__hash__

    alive: WeakSet[Trace] = WeakSet()
    most = []

    def traces():
        for i in range(50):
            trace = Trace(id=str(i), question=f"{i % 5}?", response=f"<think>{i % 10}</think> {i % 5}")
            alive.add(trace)
            most.append(len(alive))
            yield trace

    rows_of, selected = fused_rows(traces, Selected([Item(str(i), "") for i in range(50)]))
    keys = [item.key for item in selected.kept]
    assert keys == [f"{i}/{form}" for i in range(10) for form in ("think", "no_think") if form == "think" or i < 5]
    assert [row["id"] for row in rows_of(selected.kept)] == keys
    assert [row["id"] for row in rows_of(selected.kept[3:5])] == keys[3:5]
    assert max(most) <= 3


def test_pairs_are_chosen_by_the_seed_and_among_what_is_kept(tmp_path, call):
    with RunDir.create(tmp_path / "runs", "grpo", name="many", metadata=FACTS) as run:
        rewards = [1.0] * 5 + [0.0] * 5 + [None] * 3
        rows = [
            rollout("many", "a: 3 + 4?", i, f"{i} of it", reward=reward, tokens=i) for i, reward in enumerate(rewards)
        ]
        run.commit_rollouts("train", 0, rows)
    chosen = [
        [(r["chosen"], r["rejected"]) for r in call(run.path, emit="pairs", seed=seed, overwrite=True)[0]]
        for seed in (0, 0, 1)
    ]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(set(chosen[0])) == 4
    rows, stages = call(run.path, emit="pairs", where="num_response_tokens IN (2, 7, 11)", overwrite=True)
    assert [(r["chosen"], r["rejected"]) for r in rows] == [("2 of it", "7 of it")]
    assert stages == [("source", 13, 0), ("where", 3, 10), ("pairs", 1, 0)]
    with pytest.raises(RlvrError, match="the stage 'pairs' dropped the last 5 rows"):
        call(run.path, emit="pairs", where="reward = 1", overwrite=True)


def test_pairs_do_not_depend_on_the_order_of_commits(tmp_path, call):
    def pairs(name, order):
        with RunDir.create(tmp_path / name, "grpo", name="r", metadata=FACTS) as run:
            for i in order:
                run.commit_rollouts("train", 0, [rollout("r", "a: 3 + 4?", i, f"{i} of it", reward=float(i % 2))])
        return [(r["chosen"], r["rejected"]) for r in call(run.path, emit="pairs", overwrite=True)[0]]

    assert pairs("one", range(6)) == pairs("other", [5, 2, 0, 3, 1, 4])


def test_pairs_of_more_responses_than_are_held_are_the_same(made, call, tmp_path, monkeypatch):
    held = call(made, emit="pairs")
    monkeypatch.setattr("rlvr_cli.runs.storage.spilled.IN_MEMORY", 2)
    assert call(made, emit="pairs", overwrite=True) == held
    assert len(held[0]) == 2

    def full(*, dir):
        assert dir == tmp_path, "where the user wants the file"
        return open("/dev/full", "w+b")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(RlvrError, match=r"Cannot write .*out\.jsonl: No space left"):
        call(made, emit="pairs", overwrite=True)


@pytest.mark.parametrize(
    "flags", [{"correct_only": True}, {"limit": 3}, {"max_per_question": 2}, {"with_control": True}]
)
def test_pairs_exclude_what_would_take_a_partner_away(made, call, flags):
    with pytest.raises(RlvrError, match=f"--{next(iter(flags)).replace('_', '-')} and --emit pairs exclude each other"):
        call(made, emit="pairs", **flags)


def test_pairs_need_a_run(call):
    with pytest.raises(RlvrError, match="--emit pairs needs sampled responses"):
        call("arithmetic:10", emit="pairs")


def test_pairs_name_the_command_that_takes_them(made, call, capsys):
    capsys.readouterr()
    filter_run(
        resolve(
            FilterConfig,
            flags={"source": (str(made),), "emit": "pairs", "out": str(made.parent / "p.jsonl")},
            command="filter",
        )
    )
    assert "next     rlvr dpo --dataset" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("grader", "named"), [("gsm8k", " --grader gsm8k"), ("environment", ""), ("judge:rubric.toml", "")]
)
def test_the_command_for_the_traces_names_a_grader_that_it_can_have(grader, named):
    described = [{"run": "r", "grader": grader, "prompt": None}]
    config = FilterConfig(source=("r",), out="o.jsonl")
    assert next_command(config, described) == f"rlvr sft --dataset o.jsonl{named}"
    ruled = [{**each, "format_rule": ["--format-rule", "lenient"]} for each in described]
    rule = "" if grader == "gsm8k" else " --format-rule lenient"  # of which it would be an error
    assert next_command(config, ruled) == f"rlvr sft --dataset o.jsonl{named}{rule}"


@pytest.mark.parametrize(
    ("emit", "command"),
    [
        ("traces", "rlvr sft --dataset o.jsonl --chat"),
        ("pairs", "rlvr dpo --dataset o.jsonl --chat"),
        ("questions", ""),
    ],
)
def test_no_command_has_the_verifier_or_the_prompt_of_a_search(emit, command):
    facts = {"grader": "kissing", "prompt": {"name": "discover"}, "chat": ["--chat"]}
    described = [{"run": "r", "command": "discover", **facts}]
    assert next_command(FilterConfig(source=("r",), out="o.jsonl", emit=emit), described) == command


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"format_rule": "lenient", "environment": "", "tool": [], "max_turns": 8}, " --format-rule lenient"),
        ({"format_rule": "literal", "environment": "python", "max_turns": 8}, " --environment python"),
        (
            {"chat": True, "tool": ["a.py:f", "b.py:g"], "max_turns": 3},
            " --chat --tool a.py:f --tool b.py:g --max-turns 3",
        ),
    ],
)
def test_the_command_for_questions_asks_them_as_the_run_did_and_in_the_order_of_the_file(tmp_path, config, named):
    with RunDir.create(tmp_path, "eval", name="r", metadata={"config": config}) as run:
        run.commit_rollouts("eval", 0, [a_rollout(run_id="r")])
    described = [_description(read_run(run.path), phase="eval")]
    for order, more in (("source", ""), ("easy_first", " --question-order file")):
        asked = FilterConfig(source=("r",), out="o.jsonl", emit="questions", order=order)
        assert next_command(asked, described) == f"rlvr grpo --dataset o.jsonl{named}{more}"


def test_the_rows_of_a_file_are_not_held(tmp_path):
    class Row(dict):
        __hash__ = object.__hash__

    alive: WeakSet[Row] = WeakSet()
    most = []

    def rows_of(items):
        for item in items:
            row = Row(id=item.key)
            alive.add(row)
            most.append(len(alive))
            yield row

    data, written = encoded(tmp_path / "kept.jsonl", [Item(str(i), "") for i in range(50)], rows_of)
    assert max(most) <= 3
    assert [json.loads(line)["id"] for line in bytes(data).splitlines()] == [str(i) for i in range(50)]
    assert written == {"file": "kept.jsonl", "rows": 50, "sha256": hashlib.sha256(data).hexdigest()}
    assert not list(tmp_path.iterdir())
