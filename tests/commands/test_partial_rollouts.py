"""`rlvr grpo --partial-rollout-tokens`: what is sampled when, by which policy, and what is trained on."""

import json
import math
import shutil
from collections import defaultdict
from itertools import chain

import pytest
import torch

from factories import a_segment
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.queries.run_list import list_runs
from rlvr_cli.analysis.statistics.alarms import find_alarms
from rlvr_cli.commands import grpo
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.tokens.tokenization import collate
from rlvr_cli.rollouts.requests import request_seed
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.readers import read_rollouts, read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.parquet import to_rollouts
from rlvr_cli.training.updates.scores import compute_log_probs

SMALL = {
    "dataset": "arithmetic:64",
    "n_grpo_steps": 7,
    "rollout_batch_size": 16,
    "group_size": 4,
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "sampling_max_tokens": 24,
    "partial_rollout_tokens": 6,
    "learning_rate": 1e-3,
    "eval_every": 0,
    "eval_examples": 1,
    "eval_max_tokens": 8,
    "grader_workers": 1,
    "run": "r",
}

HALVES = {"train_batch_size": 8, "gradient_accumulation_steps": 1}  # two updates on a full batch
FEW = {"rollout_batch_size": 8, "train_batch_size": 8, "group_size": 2}
MORE = {"rollout_batch_size": 32, "train_batch_size": 32, "group_size": 2}


@pytest.fixture
def train(tmp_path):
    """Run GRPO with these options beside SMALL; the directory of the run."""

    def run(**given):
        grpo.run(GrpoConfig(**{**SMALL, **given, "runs_dir": str(tmp_path)}))
        assert check_run(tmp_path / given.get("run", "r"), seed_of=request_seed).problems == []
        return tmp_path / given.get("run", "r")

    return run


def rows_of(run, phase="train"):
    return to_rollouts(read_rollouts(run, phase=phase))


def select(run, sql):
    with open_runs([read_run(run)]) as database:
        return database.select(sql).rows


def metrics_of(run):
    found = defaultdict(dict)
    for name, step, value in select(run, "select name, step, value from metrics where phase = 'train' order by step"):
        found[name][step] = value
    return found


def log_probs(model, rows):
    """Of each row's tokens, by one forward pass of this model."""
    policy = load_policy(model, dtype="float32", device="cpu")
    batch = collate([r.prompt_ids for r in rows], [r.response_ids for r in rows], pad_id=0)
    found = compute_log_probs(policy, batch, micro_batch_size=8)
    return [found[i][batch["response_mask"][i]] for i in range(len(rows))]


def without(rows, *names):
    return [{k: v for k, v in row.items() if k not in ("run_id", "sampled_at", *names)} for row in rows]


@pytest.mark.slow
def test_with_enough_tokens_for_a_response_nothing_changes(train):
    whole = train(run="whole", partial_rollout_tokens=0, importance_correction="truncated", n_grpo_steps=2)
    parts = train(run="parts", partial_rollout_tokens=24, n_grpo_steps=2)
    for phase in ("train", "eval"):
        a, b = (read_rollouts(run, phase=phase).to_pylist() for run in (whole, parts))
        assert without(a) == without(b)
    assert (whole / "model/model.safetensors").read_bytes() == (parts / "model/model.safetensors").read_bytes()
    assert not (whole / "segments").exists()
    assert set(metrics_of(parts)["partial/unfinished_share"].values()) == {0.0}


def rates_of(run):
    """Of each update that was made: its number, that of its batch, its place in it, updates made before it, and its learning rate."""
    found = metrics_of(run)
    begins = sorted(found["step/seconds"])
    made = [step for step, tokens in found["update/tokens"].items() if tokens]
    numbers = [sum(begin <= step for begin in begins) - 1 for step in made]
    rates = [found["optimizer/learning_rate"][step] for step in made]
    return [
        (step, number, step - begins[number], before, rate)
        for before, (step, number, rate) in enumerate(zip(made, numbers, rates, strict=True))
    ]


def test_the_schedule_goes_by_batches_and_empty_ones_do_not_warm_up(train, capsys):
    """Two updates are planned for each of 6 batches; two make a warm-up, and the cosine has 9 steps from the third planned one on."""
    run = train(**HALVES, n_grpo_steps=6, lr_schedule="cosine", warmup_steps=2)
    found = rates_of(run)
    assert found[0][1] >= 2, "batches without a row come first"
    assert len(found) > 3
    assert found[-1][0] < 2 * found[-1][1], "there are fewer updates than were planned"
    for _, number, place, before, rate in found:
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * (2 * number + place - 2) / 9))
        assert rate == pytest.approx(1e-3 * ((before + 1) / 2 if before < 2 else cosine)), (number, place)
    assert "questions are unfinished and were not trained on\n" in capsys.readouterr().err, "it cannot be extended"


@pytest.mark.slow
def test_an_earlier_run_goes_on_with_its_warm_up(train, tmp_path):
    """It counted every update, also of batches without a row; a run that is resumed otherwise has the rates of one that was not."""
    whole = train(**HALVES, n_grpo_steps=5, warmup_steps=8)
    run = train(**HALVES, n_grpo_steps=4, warmup_steps=8, run="cut")
    earlier = tmp_path / "earlier"
    shutil.copytree(run, earlier)
    with RunDir.resume(earlier) as opened:
        opened.update(schedule=None)
    more = {"n_grpo_steps": 5, "runs_dir": str(tmp_path)}
    for path in (run, earlier):
        grpo.run(resolve(GrpoConfig, flags={"resume": str(path), **more}, command="grpo"))
    assert rates_of(run) == rates_of(whole)
    later = [(step, rate) for step, number, _, _, rate in rates_of(earlier) if number == 4]
    assert later
    assert [rate for _, rate in later] == pytest.approx([1e-3 * min((step + 1) / 8, 1) for step, _ in later])


@pytest.mark.slow
def test_a_policy_that_does_not_change_could_have_sampled_each_response_at_once(train):
    run = train(learning_rate=1e-30)
    rows = rows_of(run)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (run / "model", builtin_model_path())]
    assert weights[0] == weights[1], "the steps of this size change nothing"
    assert max(len(set(r.token_versions or ())) for r in rows) == 4
    for row, expected in zip(rows, log_probs(builtin_model_path(), rows), strict=True):
        # The first tokens could not be the end: there the sampler's distribution is another.
        assert torch.tensor(row.sampled_logprobs)[4:].tolist() == pytest.approx(expected[4:].tolist(), abs=2e-5)
    assert max(metrics_of(run)["mismatch/importance_weight_mean"].values()) == pytest.approx(1, abs=0.05)
    # The draws of the segments are different ones: nothing is repeated in the middle.
    halves = [(r.response_ids[:6], r.response_ids[6:12]) for r in rows if len(r.response_ids) >= 12]
    assert sum(a == b for a, b in halves) == 0


@pytest.mark.slow
def test_each_token_has_the_log_probability_that_its_policy_gave_it(train):
    """Also where the weights have changed in between: the policies of all steps are the final models of shorter runs."""
    models = {0: builtin_model_path()}
    for steps in range(1, 4):
        models[steps] = train(**MORE, run=f"after-{steps}", n_grpo_steps=steps) / "model"
    rows = rows_of(train(**MORE, n_grpo_steps=4))
    mixed = [r for r in rows if r.token_versions]
    assert len(mixed) > 10
    assert {v for r in mixed for v in r.token_versions} >= {0, 1, 2, 3}
    compared, moved = 0, 0.0
    for version, model in models.items():
        for row, expected in zip(rows, log_probs(model, rows), strict=True):
            versions = row.token_versions or (row.policy_version,) * len(row.response_ids)
            for place in range(4, len(versions)):
                gap = abs(row.sampled_logprobs[place] - expected[place].item())
                if versions[place] == version:
                    assert gap < 5e-5
                    compared += 1
                else:
                    moved = max(moved, gap)
    assert compared == sum(max(len(r.response_ids) - 4, 0) for r in rows)
    assert moved > 0.01, "the policies differ"


def test_the_rows_are_what_the_segments_say(train):
    several = {"epochs_per_rollout_batch": 2, "train_batch_size": 8, "gradient_accumulation_steps": 1}
    run = train(**several, loss_type="grpo_clip", sampling_max_tokens=18)
    with RunDir.annotate(run) as opened:
        steps = {step: opened.segments(step) for step in opened.segment_steps()}
    rows = rows_of(run)
    responses = defaultdict(list)  # a slow reference: every response, by where it began
    open_now = {}
    for step, segments in steps.items():
        for s in segments:
            assert (s.step, s.policy_version) == (step, step)
            if s.start == 0:
                open_now[s.example_id, s.sample_index] = step
            responses[open_now[s.example_id, s.sample_index], s.example_id, s.sample_index].append(s)
    for row in rows:
        parts = responses[row.policy_version, row.example_id, row.sample_index]
        assert row.response_ids == tuple(chain.from_iterable(p.response_ids for p in parts))
        assert row.sampled_logprobs == tuple(chain.from_iterable(p.sampled_logprobs for p in parts))
        versions = tuple(chain.from_iterable([p.step] * len(p.response_ids) for p in parts))
        assert (row.token_versions or (row.policy_version,) * len(versions)) == versions
        assert (row.response, row.finish_reason, row.seed) == (
            parts[-1].response,
            parts[-1].finish_reason,
            parts[0].seed,
        )
        assert all(len(p.response_ids) == 6 for p in parts[:-1])
        assert [p.start for p in parts] == [6 * i for i in range(len(parts))]
        assert len({p.seed for p in parts}) == len(parts)
    assert {len(parts) for parts in responses.values()} == {1, 2, 3}
    assert {(r.finish_reason, r.num_response_tokens == 18) for r in rows} >= {("stop", False), ("length", True)}
    # A group is in the step in which its last response ends, and the number in flight is always the same.
    groups = defaultdict(list)
    for row in rows:
        groups[row.step, row.example_id].append(row)
    for (step, name), group in groups.items():
        assert [r.sample_index for r in sorted(group, key=lambda r: r.sample_index)] == [0, 1, 2, 3]
        assert step == max(responses[r.policy_version, name, r.sample_index][-1].step for r in group)
    left = set()
    for step, segments in steps.items():
        now = left | {s.example_id for s in segments}
        assert len(now) == 4
        left = now - {name for at, name in groups if at == step}
    trained = {(r.policy_version, r.example_id, r.sample_index) for r in rows}
    assert {key[1] for key in responses.keys() - trained} == left, (
        "only what is in flight at the end was not trained on"
    )
    # Two updates an epoch, two epochs a batch: fewer where fewer groups have ended, and one that is skipped without any.
    metrics = metrics_of(run)
    assert len(metrics["update/skipped"]) == sum(
        max(2 * -(-sum(r.step == step for r in rows) // 8), 1) for step in steps
    )


def test_a_small_dataset_is_not_asked_a_question_that_is_in_flight(train):
    """4 questions, all in flight: the pass over the dataset comes to those that go on."""
    run = train(**FEW, dataset="arithmetic:4")
    for step, questions, most in select(
        run, "select step, count(distinct example_id), max(n) from (select step, example_id, count(*) n from segments group by all) group by 1"
    ):  # fmt: skip
        assert (questions <= 4, most <= 2) == (True, True), step
    asked = select(run, "select example_id, step from segments where start = 0 group by all")
    assert len(asked) > 6


def test_the_metrics_say_what_goes_on(train, capsys):
    run = train(n_grpo_steps=6)
    metrics, rows = metrics_of(run), rows_of(run)
    rates = dict(select(run, "select step, avg((finish_reason is null)::int) from segments group by 1"))
    assert metrics["partial/unfinished_share"] == pytest.approx(rates)
    assert metrics["sampling/tokens"] == dict(
        select(run, "select step, sum(len(response_ids)) from segments group by 1")
    ), "what was sampled in the step, and not what was trained on"
    for step in metrics["reward/mean"]:
        own = [r for r in rows if r.step == step]
        versions = [r.token_versions or (r.policy_version,) * len(r.response_ids) for r in own]
        assert metrics["partial/versions_mean"][step] == pytest.approx(sum(len(set(v)) for v in versions) / len(own))
        stale = [v != step for of_row in versions for v in of_row]
        assert metrics["sampling/stale_share"][step] == pytest.approx(sum(stale) / len(stale))
        assert metrics["sampling/lag"][step] == step - min(r.policy_version for r in own)
    # Honest staleness is no fault of the sampler: the gap is that of tokens of the policy that is trained.
    assert max(metrics["mismatch/logprob_max_abs"].values()) < 1e-3
    said = capsys.readouterr().err
    assert "log-probabilities differ" not in said
    waited = {step for step, ended in metrics["groups/sampled"].items() if not ended}
    assert waited
    assert said.count("so there is nothing to train on yet") == len(waited)
    assert all(metrics["update/skipped"][step] == 1 and step not in metrics["loss/objective"] for step in waited)
    assert [alarm for alarm in find_alarms(metrics) if "no update" in str(alarm)] == []
    in_flight = metrics["partial/groups_in_flight"][5]
    unfinished = f"{in_flight:.0f} questions are unfinished and were not trained on"
    assert f"{unfinished}: with more --n-grpo-steps, --resume goes on with them\n" in said
    assert "step 1: all 4 questions go on" in said
    assert "each response goes on by up to 6 of its 24 tokens a batch" in said
    assert read_run(run).metadata["planned"] == {"steps": 6, "updates": 6}
    assert [(row["done"], row["planned"]) for row in list_runs([run])] == [(6, 6)]
    more = {"resume": str(run), "n_grpo_steps": 7, "time_limit": "0.01s"}
    grpo.run(resolve(GrpoConfig, flags=more, command="grpo"))
    assert f"{unfinished}: with a longer --time-limit, --resume goes on with them\n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_with_more_steps_goes_on_with_what_is_in_flight(train, tmp_path):
    whole, parts = train(run="whole", n_grpo_steps=5), train(run="parts", n_grpo_steps=2)
    flags = {"resume": "parts", "runs_dir": str(tmp_path), "n_grpo_steps": 5}
    grpo.run(resolve(GrpoConfig, flags=flags, command="grpo"))
    a, b = (read_rollouts(run, phase="train").to_pylist() for run in (whole, parts))
    assert without(a) == without(b)
    a, b = (select(run, "select step, example_id, sample_index, response_ids from segments") for run in (whole, parts))
    assert a == b


def test_a_stop_string_across_a_border_ends_the_response(train, tmp_path, tiny_model, tiny_tokenizer):
    """A policy that can only spell `</answer>`, letter by letter: 5 tokens a step cut it after `</ans`."""
    letters = tiny_tokenizer.convert_tokens_to_ids(list("</answer>"))
    with torch.no_grad():
        embeddings = torch.zeros_like(tiny_model.get_input_embeddings().weight)
        embeddings[letters, range(9)] = 1.0
        head = torch.zeros_like(embeddings)
        for k in range(9):
            head[letters[(k + 1) % 9], k] = 50.0
        for layer in tiny_model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        tiny_model.get_input_embeddings().weight = torch.nn.Parameter(embeddings)
        tiny_model.lm_head.weight = torch.nn.Parameter(head)
    tiny_model.config.tie_word_embeddings = False
    tiny_model.save_pretrained(tmp_path / "speller")
    tiny_tokenizer.save_pretrained(tmp_path / "speller")
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps({"question": f"{i}<", "answer": "7"}) + "\n" for i in range(9))
    )
    (tmp_path / "prompt").write_text("{question}")
    run = train(
        model=str(tmp_path / "speller"),
        dataset=str(tmp_path / "d.jsonl"),
        prompt=str(tmp_path / "prompt"),
        eval_dataset=str(tmp_path / "d.jsonl"),
        n_grpo_steps=5,
        learning_rate=1e-30,
        sampling_max_tokens=25,
        partial_rollout_tokens=5,
    )
    rows = rows_of(run)
    assert {(r.response, r.stop_reason, r.num_response_tokens) for r in rows} == {
        ("/answer></answer>", "</answer>", 17)
    }
    assert {r.step for r in rows} == {3}
    segments = select(run, "select start, response, len(response_ids), finish_reason from segments where step < 4")
    assert set(segments) == {
        (0, "/answ", 5, None),
        (5, "/answer></", 5, None),
        (10, "/answer></answe", 5, None),
        (15, "/answer></answer>", 2, "stop"),
    }


def test_a_grader_that_fails_stops_the_run_at_the_first_groups_that_end(train, tmp_path):
    """The batches before them have nothing to grade; one process does these, and the next one those that end."""
    (tmp_path / "e.jsonl").write_text('{"question": "e?", "answer": "e"}\n')
    (tmp_path / "g.py").write_text("def grade(response, truth):\n    return {'e': 1.0}[truth]\n")
    failing = {"grader": f"{tmp_path}/g.py:grade", "eval_dataset": str(tmp_path / "e.jsonl")}
    run = train(**failing, n_grpo_steps=1)
    assert rows_of(run) == []
    with pytest.raises(RlvrError, match="responses of the first batch could not be graded"):
        grpo.run(resolve(GrpoConfig, flags={"resume": str(run), "n_grpo_steps": 7}, command="grpo"))
    assert len({row.step for row in rows_of(run)}) == 1


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"async_steps": 1}, "--async-steps and --partial-rollout-tokens exclude each other"),
        ({"dynamic_sampling": True}, "--dynamic-sampling and --partial-rollout-tokens exclude each other"),
        ({"partial_rollout_tokens": 7}, "--sampling-max-tokens 24 is not a multiple of --partial-rollout-tokens 7"),
        ({"partial_rollout_tokens": 48}, "--sampling-max-tokens 24 is not a multiple of --partial-rollout-tokens 48"),
        ({"partial_rollout_tokens": 3}, "--partial-rollout-tokens 3 is below --sampling-min-tokens 4"),
    ],
)
def test_what_does_not_go_together_is_refused(train, tmp_path, given, problem):
    with pytest.raises(RlvrError) as refused:
        train(**given)
    assert refused.value.problem.startswith(problem)
    assert refused.value.hint
    assert not (tmp_path / "r").exists()


def test_a_loss_per_response_needs_the_correction_to_be_off(train, tmp_path):
    with pytest.raises(RlvrError, match="--importance-correction needs one per token"):
        train(loss_type="kimi")
    given = {"loss_type": "kimi", "importance_correction": "none", "dry_run": True, "runs_dir": str(tmp_path)}
    grpo.run(GrpoConfig(**{**SMALL, **given}))


def test_segments_are_read_by_sql_and_are_no_rollouts(tmp_path):
    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        run.commit_segments(0, [a_segment(), a_segment(sample_index=1, finish_reason="stop")], cost={"tokens": 2.0})
        assert run.cost("train", 0) == {}
        assert run.cost("train", 0, folder="segments") == {"tokens": 2.0}
        assert run.missing_indices("train", 0, "q0", num_samples=2) == [0, 1]
        with pytest.raises(AssertionError, match="already committed"):
            run.commit_segments(0, [a_segment()])
    assert select(tmp_path / "r", "select sample_index, finish_reason from segments order by 1") == [
        (0, None),
        (1, "stop"),
    ]
    assert select(tmp_path / "r", "select count(*) from rollouts") == [(0,)]
    assert (check_run(tmp_path / "r").problems, check_run(tmp_path / "r").rows) == ([], 0)
