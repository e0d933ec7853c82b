"""`rlvr grpo` and `rlvr ei` on the built-in model: what is trained on, what is logged, and that it teaches."""

import contextlib
import hashlib
import io
import itertools
import json
import re
import shutil
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from cache_share import CACHE_SHARE
from marks import full, slow
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.commands import ei, grpo
from rlvr_cli.config.ei import EiConfig
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.language import language_share
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.tokens.tokenization import collate
from rlvr_cli.runs import run_dir
from rlvr_cli.runs.readers import read_rollouts, read_run
from rlvr_cli.training import checkpoints
from rlvr_cli.training.updates.scores import compute_log_probs

SMALL = {
    "dataset": "arithmetic:200",
    "n_grpo_steps": 1,
    "rollout_batch_size": 16,
    "group_size": 4,
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "sampling_max_tokens": 32,
    "learning_rate": 1e-3,
    "eval_every": 0,
    "eval_examples": 2,
    "eval_max_tokens": 8,
    "grader_workers": 1,
    "run": "r",
}
VLLM = {"engine": "vllm", "max_model_len": 128, "gpu_memory_utilization": CACHE_SHARE}


class Trained(NamedTuple):
    path: Path
    rows: list[dict]  # of training
    metrics: dict[tuple[str, str], dict[int, float]]  # (phase, name) -> {step: value}
    said: str


def trained(folder, **given):
    """Run GRPO with these options beside SMALL, in this folder of runs."""
    options = SMALL | given
    with contextlib.redirect_stderr(io.StringIO()) as said:
        grpo.run(GrpoConfig(**options, runs_dir=str(folder)))
    path = folder / options["run"]
    return Trained(path, rows_of(path), metrics_of(path), said.getvalue())


def go_on(folder, **given):
    """Resume a run, `r` unless another is named, with these options."""
    grpo.run(resolve(GrpoConfig, flags={"resume": "r", "runs_dir": str(folder), **given}, command="grpo"))


@pytest.fixture
def train(tmp_path):
    return lambda **given: trained(tmp_path, **given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The runs that several tests read."""
    return tmp_path_factory.mktemp("runs")


CLIPPED = {
    "n_grpo_steps": 2, "train_batch_size": 8, "epochs_per_rollout_batch": 2, "learning_rate": 3e-3, "lr_schedule": "cosine",
    "kl_coef": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def clipped(folder):
    """Four updates on each of two batches."""
    return trained(folder, loss_type="grpo_clip", run="clipped", **CLIPPED)


CENTERED = {"gradient_accumulation_steps": 1, "advantage_eps": 0.25}


@pytest.fixture(scope="module")
def centered(folder):
    """What these advantages are is also seen where rewards are shaped, and each division in the replays of runs."""
    return trained(folder, use_std_normalization=False, run="centered", **CENTERED)


@pytest.fixture(scope="module")
def raw(folder):
    return trained(folder, loss_type="no_baseline", std_normalization="batch", run="raw")


@pytest.fixture(scope="module")
def hopeless(folder):
    """Dynamic sampling among questions that no response answers, with evaluations."""
    (folder / "never.jsonl").write_text(
        "".join(json.dumps({"question": f"{i}?", "answer": "never"}) + "\n" for i in range(50))
    )
    data = {"dataset": str(folder / "never.jsonl"), "eval_dataset": str(folder / "never.jsonl"), "eval_every": 1}
    how = {"dynamic_sampling": True, "max_sampling_rounds": 2, "sampling_max_tokens": 8, "n_grpo_steps": 2}
    return trained(folder, run="hopeless", **data, **how)


@pytest.fixture(scope="module")
def flawed(folder):
    """Some grades fail, and responses that are cut at the limit are masked."""
    (folder / "mine.py").write_text(
        "def grade(response, truth):\n"
        "    if truth in '0123': raise KeyError(truth)\n"
        "    return {'format_reward': 1.0, 'answer_reward': float(len(response) % 2), 'reward': float(len(response) % 2)}\n"
    )
    how = {"overlong": "mask", "sampling_max_tokens": 12, "max_grade_errors": 1}
    return trained(folder, grader=f"{folder / 'mine.py'}:grade", run="flawed", **how)


def rows_of(run, phase="train"):
    return read_rollouts(run, phase=phase).to_pylist()


def metrics_of(run):
    with open_runs([read_run(run)]) as database:
        found = defaultdict(dict)
        for phase, name, step, value in database.select("select phase, name, step, value from metrics").rows:
            found[phase, name][step] = value
    return found


def groups_of(rows):
    """(step, example_id) -> its rows, by sample."""
    groups = defaultdict(list)
    for row in sorted(rows, key=lambda r: r["sample_index"]):
        groups[row["step"], row["example_id"]].append(row)
    return groups


TERMS = ("format_term", "length_term", "language_term", "overlong_term")


def test_every_response_is_stored_with_its_groups_advantage(train):
    path, rows, metrics, _ = train(n_grpo_steps=3, eval_every=2)
    assert {r["step"] for r in rows} == {0, 1, 2}
    groups = groups_of(rows)
    assert len(groups) == 3 * 4
    assert {len(group) for group in groups.values()} == {4}
    for group in groups.values():
        rewards = [r["reward"] for r in group]
        spread = statistics.stdev(rewards)
        for row in group:
            expected = (row["reward"] - statistics.mean(rewards)) / (spread + 1e-6) if spread else 0.0
            assert row["advantage"] == pytest.approx(expected, abs=1e-9)
            assert row["policy_version"] == row["step"]
            assert len(row["sampled_logprobs"]) == len(row["response_ids"]) == row["num_response_tokens"]
            assert row["shaped_reward"] == row["reward"]
            assert {row[name] for name in TERMS} == {None}
    assert ("train", "reward/shaped") not in metrics
    first = [r for r in rows if r["step"] == 0]
    assert metrics["train", "reward/mean"][0] == pytest.approx(statistics.mean(r["reward"] for r in first))
    signal = statistics.mean(len({r["reward"] for r in g}) > 1 for k, g in groups.items() if k[0] == 0)
    assert metrics["train", "groups/signal_share"][0] == signal > 0
    assert {r["step"] for r in rows_of(path, "eval")} == {0, 2, 3}
    assert read_run(path).metadata["status"] == "finished"
    assert read_run(path).metadata["updates"] == 3
    assert load_policy(path / "model").model.num_parameters() == 436_480


def test_every_metric_of_an_update_is_there(clipped):
    wanted = {
        *("loss/objective", "loss/nll", "optimizer/grad_norm", "policy/entropy", "policy/kl", "policy/clip_fraction"),
        *("policy/clip_fraction_low", "policy/clip_fraction_high", "policy/ratio_p01", "policy/ratio_p99", "policy/ratio_max"),
        *("mismatch/logprob_mean_abs", "mismatch/logprob_max_abs", "mismatch/ratio_mean"),
        *("update/seconds", "update/tokens", "update/padding", "update/skipped"),
    }  # fmt: skip
    for name in wanted:
        assert set(clipped.metrics["train", name]) == set(range(8)), name
    once = {
        *("reward/mean", "reward/format", "reward/answer", "reward/grade_errors", "length/mean", "length/truncated_share"),
        *("groups/signal_share", "sampling/tokens_per_second", "sampling/seconds", "grading/seconds", "scoring/seconds"),
        *("step/seconds", "weight_sync/seconds", "entropy/mean"),
    }  # fmt: skip
    for name in once:
        assert set(clipped.metrics["train", name]) == {0, 4}, name


def test_what_was_sampled_is_trained_on_and_not_what_its_text_tokenizes_to(
    train, tmp_path, tiny_model_dir, tiny_tokenizer
):
    """A random model samples ids that no tokenizer would choose for their text. The fields are named for both files."""
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"q": f"{i}?", "a": "7"}) + "\n" for i in range(9)))
    (tmp_path / "mine.py").write_text(
        "def grade(response, truth):\n"
        "    reward = float(len(response) % 2)\n"
        "    return {'format_reward': 1.0, 'answer_reward': reward, 'reward': reward}\n"
    )
    file = str(tmp_path / "d.jsonl")
    _, rows, metrics, _ = train(
        model=str(tiny_model_dir), dataset=file, eval_dataset=file, question_field="q", answer_field="a", prompt="question_only",
        grader=f"{tmp_path / 'mine.py'}:grade", sampling_max_tokens=24,
    )  # fmt: skip
    again = [tiny_tokenizer(r["response"], add_special_tokens=False).input_ids for r in rows]
    assert sum(map(len, again)) != sum(r["num_response_tokens"] for r in rows)
    assert metrics["train", "update/tokens"][0] == sum(r["num_response_tokens"] for r in rows)
    sampled = [x for r in rows for x in r["sampled_logprobs"]]
    assert metrics["train", "loss/nll"][0] == pytest.approx(
        -statistics.mean(sampled), abs=0.02
    )  # but for barred tokens


def test_old_log_probs_are_those_before_the_first_update_on_a_batch(clipped):
    low, high = (clipped.metrics["train", f"policy/ratio_{name}"] for name in ("min", "max"))
    assert set(low) == set(range(8))
    for step in range(8):  # four updates a batch
        if step % 4 == 0:
            assert (low[step], high[step]) == (1.0, 1.0)
        else:
            assert low[step] < 1 < high[step]
    clip_fraction = clipped.metrics["train", "policy/clip_fraction"]
    assert (clip_fraction[0], clip_fraction[4]) == (0.0, 0.0)
    assert max(clip_fraction.values()) > 0
    # The sampler is compared with the policy that it sampled from, in every update on its rollouts.
    assert max(clipped.metrics["train", "mismatch/logprob_mean_abs"].values()) < 1e-3


def test_the_kl_penalty_compares_with_the_model_that_training_started_from(clipped):
    kl = clipped.metrics["train", "policy/kl"]
    assert kl[0] == 0
    assert min(kl[step] for step in range(1, 8)) > 0


def test_the_clock_goes_on_with_the_updates_of_a_batch(clipped):
    """A batch's own seconds are known after its last update, and stand at its first one."""
    with open_runs([read_run(clipped.path)]) as database:
        for query, column in (("curves", "wall_seconds"), ("progress", "minutes")):
            clock = [row[column] for row in database.select(named_queries()[query].sql).records()]
            assert len(clock) == 9
            assert clock == sorted(clock), query
            assert len({*clock}) > 7, "each update has its own time"


@pytest.mark.parametrize("position", [{"steps": 3, "updates_of_batch": 0}, {"steps": 2, "updates_of_batch": 1}])
def test_a_run_is_not_made_shorter_than_it_is(ahead, tmp_path, position):
    """A step counts from its first update on; nothing of what is refused is stored."""
    run = shutil.copytree(ahead.path, tmp_path / "r")
    state = run / "checkpoints/step-000006/state.json"
    content = json.loads(state.read_text())
    content["state"]["position"] |= position
    del content["sha256"]
    state.write_bytes(checkpoints._encoded(content))
    before = (run / "run.json").read_bytes()
    with pytest.raises(RlvrError, match="r has come to step 3 already, and is to end after step 2") as refused:
        go_on(tmp_path, n_grpo_steps=2)
    assert refused.value.hint == "--n-grpo-steps must be at least 3."
    assert (run / "run.json").read_bytes() == before


def test_a_grader_that_fails_after_a_batch_without_signal_is_not_one_that_never_worked(train, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "a?", "answer": "a"}\n{"question": "b?", "answer": "b"}\n')
    (tmp_path / "g.py").write_text("def grade(response, truth):\n    return {'a': 0.0}[truth]\n")
    data = {"dataset": str(tmp_path / "q.jsonl"), "grader": f"{tmp_path}/g.py:grade", "question_order": "file"}
    how = {"dynamic_sampling": True, "max_sampling_rounds": 1, "sampling_max_tokens": 8, "n_grpo_steps": 2}
    size = {"rollout_batch_size": 4, "train_batch_size": 4, "gradient_accumulation_steps": 1}
    assert [row["grade_error"] is None for row in train(**data, **how, **size).rows] == [True] * 4 + [False] * 4


def test_the_number_of_steps_is_fixed_by_a_cosine(clipped):
    with pytest.raises(RlvrError, match="cosine learning-rate schedule for --n-grpo-steps 2"):
        go_on(clipped.path.parent, resume="clipped", n_grpo_steps=3)


@pytest.fixture(scope="module")
def ahead(forked, folder):
    """A run whose batches are sampled one ahead."""
    return trained(
        folder, async_steps=1, n_grpo_steps=3, train_batch_size=8, learning_rate=4e-3, checkpoint_every=6, run="ahead"
    )


def test_sampling_ahead_lags_one_batch_behind_and_is_corrected_for(ahead):
    by_step = defaultdict(list)
    for row in ahead.rows:
        by_step[row["step"]].append(row)
    assert {step: {row["policy_version"] for row in of} for step, of in by_step.items()} == {0: {0}, 2: {0}, 4: {2}}
    start = load_policy(builtin_model_path()).model
    gaps = {}
    for step, of in by_step.items():
        batch = collate([r["prompt_ids"] for r in of], [r["response_ids"] for r in of], pad_id=0)
        ours = compute_log_probs(start, batch, micro_batch_size=8, temperature=1.0)[batch["response_mask"]]
        sampled = torch.tensor([x for r in of for x in r["sampled_logprobs"]])
        young = torch.cat([torch.arange(len(r["response_ids"])) < 4 for r in of])  # EOS was barred
        gaps[step] = float((ours - sampled)[~young].abs().max())
    assert gaps[0] < 1e-4
    assert gaps[2] < 1e-4  # from the start too, although two updates were made by then
    assert gaps[4] > 1e-2
    weights = ahead.metrics["train", "mismatch/importance_weight_mean"]
    assert weights[0] == pytest.approx(1, abs=1e-4)
    assert weights[2] != pytest.approx(1, abs=1e-4)
    assert ahead.metrics["train", "sampling/lag"] == {0: 0, 2: 2, 4: 2}
    assert ahead.metrics["train", "sampling/waiting_seconds"].keys() == {0, 2, 4}


def test_no_sampling_process_outlives_a_trainer_that_could_not_be_opened(ahead, tmp_path, monkeypatch):
    """For a link, and for want of space for a checkpoint, which also holds the weights that sample."""
    run = shutil.copytree(ahead.path, tmp_path / "r")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        with pytest.raises(RlvrError, match=r"for checkpoints of [0-9,]+ bytes") as refused:
            go_on(tmp_path, n_grpo_steps=4)
    said = int(re.search("of ([0-9,]+) bytes", refused.value.problem)[1].replace(",", ""))
    taken = sum(path.stat().st_size for path in (run / "checkpoints/step-000006").rglob("*") if path.is_file())
    assert taken <= said <= 1.5 * taken
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RlvrError, match="link"):
        go_on(tmp_path, n_grpo_steps=4)
    children = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    assert not any(b"rlvr_cli.samplers.parallel.serve" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children)


def test_no_baseline_weighs_by_the_reward_itself(raw):
    assert all(row["advantage"] == row["reward"] for row in raw.rows)
    assert {row["reward"] for row in raw.rows} == {0.0, 1.0}


@pytest.mark.slow
def test_without_std_normalization_advantages_are_differences(centered):
    for group in groups_of(centered.rows).values():
        mean = statistics.mean(r["reward"] for r in group)
        assert [r["advantage"] for r in group] == pytest.approx([r["reward"] - mean for r in group])


def test_dynamic_sampling_trains_on_groups_with_a_signal_and_counts_what_they_cost(train):
    _, rows, metrics, _ = train(dynamic_sampling=True, group_size=2)
    groups = [*groups_of(rows).values()]
    with_signal = [g for g in groups if len({r["reward"] for r in g}) > 1]
    assert metrics["train", "groups/sampled"] == {0: len(groups)}
    assert metrics["train", "groups/used"] == {0: len(with_signal)} == {0: 8}
    assert metrics["train", "update/rows"] == {0: 16}
    assert metrics["train", "reward/samples"] == {0: len(groups) * 2}
    assert metrics["train", "sampling/rounds"][0] > 1
    assert len({r["example_id"] for r in rows}) == len(groups_of(rows))  # 200 questions: none is asked twice yet


def test_dynamic_sampling_gives_up_after_its_rounds(hopeless):
    assert hopeless.metrics["train", "groups/used"] == {0: 0, 1: 0}
    assert hopeless.metrics["train", "groups/sampled"] == {0: 8, 1: 8}
    assert hopeless.metrics["train", "update/skipped"] == {0: 1, 1: 1}
    assert len(hopeless.rows) == 2 * 8 * 4
    before, after = (load_policy(model).model.state_dict() for model in (builtin_model_path(), hopeless.path / "model"))
    assert all((before[name] == after[name]).all() for name in before)


def test_evaluations_are_due_though_no_group_has_a_signal(hopeless):
    assert {r["step"] for r in rows_of(hopeless.path, "eval")} == {0, 1, 2}


def test_masked_responses_are_not_trained_on(flawed):
    whole = [r for r in flawed.rows if r["finish_reason"] != "length"]
    assert 0 < len(whole) < len(flawed.rows)
    assert flawed.metrics["train", "update/tokens"][0] == sum(r["num_response_tokens"] for r in whole)


def test_a_failed_grade_counts_as_nothing_and_is_counted(flawed):
    failed = [r for r in flawed.rows if r["grade_error"]]
    assert failed
    assert {(r["reward"], r["advantage"]) for r in failed} == {(None, 0.0)}
    assert flawed.metrics["train", "reward/grade_errors"][0] == len(failed)


@pytest.mark.parametrize(
    "given",
    [
        slow({"n_grpo_steps": 10}),
        slow({"loss_type": "grpo_clip", "rollout_batch_size": 64, "train_batch_size": 32, "epochs_per_rollout_batch": 2, "n_grpo_steps": 3}),
        full({"loss_type": "no_baseline"}),
        full({"length_normalization": "masked_normalize", "importance_correction": "truncated", "use_std_normalization": False}),
        slow({"loss_type": "gspo", "train_batch_size": 32, "n_grpo_steps": 6, "learning_rate": 4e-4, "std_normalization": "batch"}),
        full({"loss_type": "cispo", "train_batch_size": 32, "n_grpo_steps": 6, "learning_rate": 4e-4, "length_normalization": "token_mean"}),
        full({"loss_type": "kimi", "train_batch_size": 32, "n_grpo_steps": 6, "learning_rate": 2e-4, "std_normalization": "none"}),
    ],
    ids=["default", "off-policy", "no_baseline", "dr_grpo", "gspo", "cispo", "kimi"],
)  # fmt: skip
def test_reward_rises(train, given):
    sizes = {"rollout_batch_size": 128, "group_size": 8, "train_batch_size": 128, "eval_examples": 128}
    options = {"dataset": "arithmetic:2000", **sizes, "sampling_max_tokens": 48, "eval_max_tokens": 48}
    rewards = train(**{"n_grpo_steps": 14, **options, **given}).metrics["eval", "reward/mean"]
    before, after = (rewards[step] for step in sorted(rewards))
    assert after > before + 0.15


def test_expert_iteration_trains_on_correct_responses_once_each(tmp_path):
    ei.run(
        EiConfig(
            dataset="arithmetic:100", n_ei_steps=2, ei_batch_size=6, group_size=4, sft_epochs=2, train_batch_size=8, micro_batch_size=8,
            sampling_max_tokens=32, learning_rate=1e-3, eval_examples=2, eval_max_tokens=8, grader_workers=1, runs_dir=str(tmp_path), run="r",
        )
    )  # fmt: skip
    rows, metrics = rows_of(tmp_path / "r"), metrics_of(tmp_path / "r")
    steps, updates = sorted({r["step"] for r in rows}), read_run(tmp_path / "r").metadata["updates"]
    assert len(steps) == 2
    for start, end in zip(steps, [*steps[1:], updates], strict=True):
        sampled = [r for r in rows if r["step"] == start]
        assert len(sampled) == 6 * 4
        distinct = {(*r["prompt_ids"], -1, *r["response_ids"]) for r in sampled if r["reward"] == 1}
        assert metrics["train", "experts/distinct"][start] == len(distinct)
        assert sum(metrics["train", "update/rows"][step] for step in range(start, end)) == 2 * len(distinct)
    assert {r["step"] for r in rows_of(tmp_path / "r", "eval")} == {*steps, updates}
    assert set(metrics["train", "policy/entropy"]) == set(range(updates))
    assert {r["advantage"] for r in rows} == {None}


def test_expert_iteration_under_a_time_limit_learns_how_long_an_evaluation_takes(tmp_path, capsys):
    config = EiConfig(
        dataset="arithmetic:9", n_ei_steps=1, ei_batch_size=1, group_size=1, sampling_max_tokens=4, eval_every=0, eval_examples=1,
        checkpoint_every=0, time_limit="1h", grader_workers=1, runs_dir=str(tmp_path), run="r",
    )  # fmt: skip
    ei.run(config)
    assert {r["step"] for r in rows_of(tmp_path / "r", "eval")} == {0, 1}
    assert "before, after" in capsys.readouterr().err
    ei.run(replace(config, run="other", time_limit="", dry_run=True))
    assert re.search(r"1 questions of [^,]+, after\n", capsys.readouterr().err)


def test_a_round_without_a_correct_response_is_said_and_passed(tmp_path, capsys):
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps({"question": f"{i}?", "answer": "never"}) + "\n" for i in range(9))
    )
    ei.run(
        EiConfig(
            dataset=str(tmp_path / "d.jsonl"), n_ei_steps=2, ei_batch_size=4, group_size=2, train_batch_size=4, sampling_max_tokens=8,
            grader_workers=1, runs_dir=str(tmp_path), run="r",
        )
    )  # fmt: skip
    assert capsys.readouterr().err.count("no response was correct") == 2
    assert metrics_of(tmp_path / "r")["train", "update/skipped"] == {0: 1, 1: 1}
    rows = rows_of(tmp_path / "r")
    assert len({(r["step"], r["example_id"]) for r in rows}) == 8
    assert read_run(tmp_path / "r").metadata["status"] == "finished"


def test_the_clip_range_is_looked_at_once_after_the_first_update_that_moves_ratios(train, clipped):
    said = train(loss_type="gspo", cliprange=50.0, train_batch_size=4).said
    assert said.count("has no effect: ratios are 0.") == 1
    assert "clip range" not in clipped.said


def test_the_clip_range_is_looked_at_where_something_has_an_advantage(train, tmp_path):
    """Most updates have responses without an advantage only; the first one whose ratios moved is one of them."""
    (tmp_path / "odd.py").write_text(
        "def grade(response, truth):\n    return float(len(response) % 2) if truth in '0246' else 0.0\n"
    )
    _, _, metrics, said = train(
        loss_type="grpo_clip", cliprange=1e-7, learning_rate=3e-3, group_size=2, train_batch_size=2, seed=1,
        grader=f"{tmp_path / 'odd.py'}:grade",
    )  # fmt: skip
    cut, least, most = (metrics["train", f"policy/{n}"] for n in ("clip_fraction", "ratio_min", "ratio_max"))
    moved = [step for step in sorted(least) if least[step] < most[step]]
    assert cut[moved[0]] == 0
    assert any(cut[step] for step in moved)
    assert said.count("cuts almost all that moves") == 1


def test_advantages_are_made_of_the_shaped_reward_and_each_term_has_a_column(train):
    path, rows, metrics, _ = train(
        format_weight=0.5, length_reward=0.4, length_reward_after=1, language_reward=0.3, language="zh", overlong="soft_punish",
        overlong_buffer=16, use_std_normalization=False, n_grpo_steps=2, std_normalization="none",
    )  # fmt: skip
    assert {r["reward"] for r in rows} <= {0.0, 1.0}, "the grader's reward stays"
    for (step, _), group in groups_of(rows).items():
        lengths = [r["num_response_tokens"] for r in group]
        least, most, any_right = min(lengths), max(lengths), any(r["reward"] for r in group)
        for r, length in zip(group, lengths, strict=True):
            shorter = 0.5 - (length - least) / (most - least) if most > least and any_right and step else 0.0
            assert r["format_term"] == 0.5 * r["format_reward"]
            assert r["length_term"] == pytest.approx(0.4 * (shorter if r["reward"] else min(shorter, 0.0)))
            assert r["language_term"] == pytest.approx(0.3 * language_share(r["response"], "zh"))
            assert r["overlong_term"] == pytest.approx(-min(max((length - 16) / 16, 0), 1))
            assert r["shaped_reward"] == pytest.approx(r["reward"] + sum(r[name] for name in TERMS))
        mean = statistics.mean(r["shaped_reward"] for r in group)
        assert [r["advantage"] for r in group] == pytest.approx([r["shaped_reward"] - mean for r in group], abs=1e-12)
    assert any(r["length_term"] for r in rows)
    assert any(r["overlong_term"] for r in rows)
    assert metrics["train", "reward/shaped"][0] == pytest.approx(
        statistics.mean(r["shaped_reward"] for r in rows if r["step"] == 0)
    )
    held_out = rows_of(path, "eval")
    assert {r[name] for r in held_out for name in ("shaped_reward", *TERMS)} == {None}
    with open_runs([read_run(path)]) as database:
        sums = "abs(reward + format_term + length_term + language_term + overlong_term - shaped_reward)"
        (row,) = database.select(f"select max({sums}), count(shaped_reward) from rollouts").rows
    assert row[0] < 1e-12
    assert row[1] == len(rows)


@pytest.mark.slow
def test_over_the_batch_advantages_have_one_scale(train, centered):
    """The objective on-policy: that of the centered rewards, divided by one number, that of the rows."""
    divided = train(std_normalization="batch", **CENTERED).metrics
    scale = statistics.stdev(r["advantage"] for r in centered.rows) + 0.25
    for name in ("loss/objective", "optimizer/grad_norm"):
        expected = centered.metrics["train", name][0] / scale
        assert divided["train", name][0] == pytest.approx(expected, rel=1e-5), name


def test_raw_rewards_stay_what_they_are(raw):
    """Divided by their standard deviation over the batch they would give more than twice this objective."""
    weighted = [row["reward"] * statistics.mean(row["sampled_logprobs"]) for row in raw.rows]
    assert statistics.stdev(row["reward"] for row in raw.rows) < 0.6
    assert raw.metrics["train", "loss/objective"][0] == pytest.approx(-statistics.mean(weighted), rel=0.1)


def test_a_run_out_of_time_keeps_what_it_has_learned(train, monkeypatch):
    """The run's clock advances by three minutes whenever it is read, however busy the machine is."""
    seconds = itertools.count(step=180)
    monkeypatch.setattr(run_dir, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    path, _, _, said = train(
        n_grpo_steps=100, time_limit="1h", rollout_batch_size=8, train_batch_size=8, sampling_max_tokens=8
    )
    updates, model = read_run(path).metadata["updates"], path / "model/model.safetensors"
    assert 0 < updates < 100
    assert f"time limit 1h: stopping after {updates} updates" in said
    learned = model.read_bytes()
    assert learned != (builtin_model_path() / "model.safetensors").read_bytes()
    go_on(path.parent)
    assert read_run(path).metadata["updates"] == updates
    assert model.read_bytes() == learned


@pytest.mark.parametrize(
    "known", [{"checkpoint_seconds": 1e4}, {"most_updates": 10**4, "evaluation_seconds": 1.0}, {"longest_step": 1e4}]
)
def test_a_resumed_run_knows_what_it_needs_time_for(hopeless, tmp_path, known, capsys):
    """What was measured is in the checkpoint; the next step, its evaluations and what is saved then do not fit into the hour."""
    run = shutil.copytree(hopeless.path, tmp_path / "r")
    state = run / "checkpoints/step-000002/state.json"
    record = json.loads(state.read_text())
    del record["sha256"]
    assert record["state"].keys() >= known.keys()
    record["state"] |= known
    state.write_bytes(checkpoints._encoded(record))
    go_on(tmp_path, n_grpo_steps=3, time_limit="1h")
    assert "time limit 1h: stopping after 2 updates" in capsys.readouterr().err


def test_a_prompt_that_does_not_fit_is_named_before_anything_is_sampled(train, tmp_path):
    rows = [{"question": "What is the last digit of 1+1+1+1+1?", "answer": "5"}] * 8 + [
        {"question": "long " * 5000, "answer": "5"}
    ]
    (tmp_path / "e.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(RlvrError, match=r"Question e-9 has a prompt of \d+ tokens; with 8 for the response"):
        train(eval_dataset=str(tmp_path / "e.jsonl"), eval_examples=9)
    assert not list((tmp_path / "r/rollouts").iterdir())


@pytest.mark.vllm
@pytest.mark.parametrize("adapter", [{}, {"lora_rank": 16, "learning_rate": 4e-3}], ids=["weights", "adapter"])
def test_on_vllm_reward_rises_too_and_a_resumed_run_ends_the_same(tmp_path, adapter):
    options = {
        **SMALL, **VLLM, "dataset": "arithmetic:2000", "rollout_batch_size": 128, "group_size": 8,
        "train_batch_size": 64, "epochs_per_rollout_batch": 2, "loss_type": "grpo_clip", "n_grpo_steps": 5, "learning_rate": 4e-4,
        "sampling_max_tokens": 48, "eval_max_tokens": 48, "eval_examples": 128, "runs_dir": str(tmp_path), **adapter,
    }  # fmt: skip
    grpo.run(GrpoConfig(**options))
    metrics = metrics_of(tmp_path / "r")
    before, after = (metrics["eval", "reward/mean"][step] for step in (0, 20))
    assert after > before + 0.1
    assert {r["policy_version"] for r in rows_of(tmp_path / "r")} == {0, 4, 8, 12, 16}
    # The sampler's log-probabilities are the trainer's, before any update and after each load of weights.
    assert set(metrics["train", "mismatch/logprob_mean_abs"]) == set(range(20))
    assert max(metrics["train", "mismatch/logprob_mean_abs"].values()) < 1e-3
    assert [metrics["train", "policy/ratio_max"][step] for step in range(0, 20, 4)] == [1.0] * 5
    grpo.run(GrpoConfig(**{**options, "run": "cut", "n_grpo_steps": 2}))
    go_on(tmp_path, resume="cut", n_grpo_steps=5)
    name = "adapter_model.safetensors" if adapter else "model.safetensors"
    weights = [(tmp_path / run / "model" / name).read_bytes() for run in ("r", "cut")]
    assert weights[0] == weights[1]


@pytest.mark.vllm
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("adapter", [{}, {"lora_rank": 16}], ids=["weights", "adapter"])
def test_vllm_samples_ahead_in_a_process_of_its_own(train, adapter):
    metrics = train(async_steps=1, **VLLM, n_grpo_steps=3, learning_rate=1e-2, **adapter).metrics
    assert metrics["train", "sampling/lag"] == {0: 0, 1: 1, 2: 1}
    gaps = metrics["train", "mismatch/logprob_mean_abs"]
    assert 10 * gaps[0] < min(gaps[1], gaps[2])
    assert gaps[0] < 1e-3 < max(gaps.values())


OWN_LOSSES = """
import torch

import rlvr_cli

def clip(inputs):
    ratio = (inputs.log_probs - inputs.old_log_probs).exp()
    unclipped, limited = ratio * inputs.advantages, ratio.clamp(1 - 0.2, 1 + 0.2) * inputs.advantages
    return -torch.minimum(unclipped, limited), {"clipped": limited < unclipped, "surprise": -inputs.log_probs}

def per_row(inputs):
    mask = inputs.response_mask
    means = (inputs.log_probs * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    same = inputs.group[:, None] == inputs.group
    unbalanced = (same * inputs.advantages[:, 0]).sum(dim=1).abs()
    return -inputs.advantages[:, 0] * means, {"unbalanced": unbalanced, "of_group": same.sum(dim=1)}

def of_the_rest(inputs):
    return -inputs.log_probs * (inputs.advantages == 0) - 0.1 * inputs.entropy * (inputs.advantages == 0)
"""


@pytest.fixture
def own_losses(tmp_path):
    file = tmp_path / "losses.py"
    file.write_text(OWN_LOSSES)
    return file


@pytest.mark.slow
def test_a_copy_of_a_loss_in_a_users_file_has_the_same_trajectory(train, own_losses, clipped):
    """To the last bit: tokens, metrics and weights."""
    own = train(loss_type=f"{own_losses}:clip", **CLIPPED)
    assert [r["response_ids"] for r in own.rows] == [r["response_ids"] for r in clipped.rows]
    weights = [(path / "model/model.safetensors").read_bytes() for path in (own.path, clipped.path)]
    assert weights[0] == weights[1]
    timed = ("seconds", "per_second", "memory", "utilization")
    for key in own.metrics.keys() & clipped.metrics.keys():
        if not any(word in key[1] for word in timed):
            assert own.metrics[key] == clipped.metrics[key], key
    assert own.metrics["train", "policy/surprise_mean"] == pytest.approx(own.metrics["train", "loss/nll"])


@pytest.mark.slow
def test_a_loss_per_row_is_the_mean_over_its_tokens(train, own_losses, centered):
    """And it is told which rows are of one group: their advantages sum to 0."""
    own = train(loss_type=f"{own_losses}:per_row", use_std_normalization=False, **CENTERED).metrics
    assert centered.metrics["train", "optimizer/grad_norm"][0] > 0
    for name in ("loss/objective", "optimizer/grad_norm"):
        assert own["train", name] == pytest.approx(centered.metrics["train", name], rel=1e-4, abs=1e-7), name
    assert own["train", "loss/denominator"] == {0: 16}
    # Rows without an advantage are a micro-batch of their own; those with one have their whole group beside them.
    assert own["train", "policy/of_group_mean"][0] == 4
    assert own["train", "policy/unbalanced_mean"][0] == pytest.approx(0, abs=1e-6)


def test_a_users_loss_learns_from_responses_without_an_advantage(train, own_losses):
    """For what rlvr knows, it may have a gradient there: an entropy bonus has."""
    metrics = train(loss_type=f"{own_losses}:of_the_rest", group_size=2).metrics
    assert 0 < metrics["train", "groups/signal_share"][0] < 1
    assert metrics["train", "optimizer/grad_norm"][0] > 0


@pytest.fixture
def begun(train, tmp_path, own_losses):
    """A run of two updates whose model was moved since; what it takes to go on with it."""
    shutil.copytree(builtin_model_path(), tmp_path / "here")
    train(loss_type=f"{own_losses}:clip", model=str(tmp_path / "here"), train_batch_size=8)
    (tmp_path / "here").rename(tmp_path / "there")
    return {"folder": tmp_path, "model": str(tmp_path / "there"), "n_grpo_steps": 2}


@pytest.mark.slow
def test_a_run_goes_on_with_its_loss_and_its_model_wherever_that_is_now_and_no_other(begun, tmp_path, own_losses):
    facts = read_run(tmp_path / "r").metadata["facts"]["loss"]
    assert facts["sha256"] == hashlib.sha256(own_losses.read_bytes()).hexdigest()
    own_losses.write_text(OWN_LOSSES + "\n# another\n")
    with pytest.raises(RlvrError, match="its loss sha256 was"):
        go_on(**begun)
    own_losses.write_text(OWN_LOSSES)
    with pytest.raises(RlvrError, match="--train-batch-size 8 is not a multiple of --gradient-accumulation-steps 3"):
        go_on(**begun, gradient_accumulation_steps=3)
    go_on(**begun, gradient_accumulation_steps=4)
    assert read_run(tmp_path / "r").metadata["updates"] == 4
    config = tmp_path / "there/tokenizer_config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(RlvrError, match="its model tokenizer_sha256 was"):
        go_on(**begun)


def test_a_users_loss_is_tried_before_anything_is_made(tmp_path, own_losses, capsys):
    own_losses.write_text(OWN_LOSSES + "def bad(inputs):\n    return inputs.log_probs.mean()\n")
    runs = tmp_path / "runs"
    line = OWN_LOSSES.count("\n") + 1
    with pytest.raises(RlvrError, match=rf"losses\.py:{line}: the loss has shape \(\)"):
        grpo.run(GrpoConfig(**{**SMALL, "loss_type": f"{own_losses}:bad", "runs_dir": str(runs)}))
    assert not runs.exists()
    assert "model" not in capsys.readouterr().err


def test_the_plan_names_a_users_loss_and_claims_nothing_about_its_ratios(tmp_path, own_losses, capsys):
    def plan_of(**given):
        few = {"dataset": "arithmetic:32", "runs_dir": str(tmp_path / "runs"), "dry_run": True}
        grpo.run(GrpoConfig(**few, **given))
        return capsys.readouterr().err

    for epochs in (1, 2):
        said = plan_of(loss_type=f"{own_losses}:clip", epochs_per_rollout_batch=epochs)
        assert f"      (1/256) sum_i (1/|o_i|) sum_t {own_losses}:clip;" in said
        assert "note:" not in said
    shown = plan_of(loss_type=f"{own_losses}:per_row", kl_coef=0.1)
    assert f"      (1/256) sum_i [{own_losses}:per_row + 0.1 mean_t k3(p_ref, p)];" in shown


def test_a_loss_per_row_says_what_has_no_effect_and_refuses_what_cannot_be(tmp_path, own_losses, capsys):
    flags = {
        "dataset": "arithmetic:32",
        "loss_type": f"{own_losses}:per_row",
        "runs_dir": str(tmp_path / "runs"),
        "dry_run": True,
    }
    grpo.run(resolve(GrpoConfig, flags=flags | {"length_normalization": "token_mean"}, command="grpo"))
    assert "--length-normalization has no effect" in capsys.readouterr().err
    grpo.run(resolve(GrpoConfig, flags=flags, command="grpo"))
    assert "--length-normalization has no effect" not in capsys.readouterr().err
    for correction in ({"importance_correction": "truncated"}, {"async_steps": 1}):
        with pytest.raises(RlvrError, match="gives one loss per response"):
            grpo.run(resolve(GrpoConfig, flags=flags | correction, command="grpo"))


def test_a_group_of_one_needs_a_loss_without_a_baseline(tmp_path, capsys, own_losses):
    flags = {"dataset": "arithmetic:300", "group_size": 1, "runs_dir": str(tmp_path / "runs"), "dry_run": True}
    for loss_type in ("reinforce_with_baseline", f"{own_losses}:clip"):
        with pytest.raises(RlvrError, match="--group-size 1 every advantage is 0") as refused:
            grpo.run(GrpoConfig(**flags, loss_type=loss_type))
        assert refused.value.hint == "Use --group-size 8, or --loss-type no_baseline."
    grpo.run(GrpoConfig(**flags, loss_type="no_baseline"))
    assert "advantage      A_i = r_i\n" in capsys.readouterr().err
