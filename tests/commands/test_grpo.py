"""`rlvr grpo` and `rlvr ei` on the built-in model: what is trained on, what is logged, and that it teaches."""

import hashlib
import json
import shutil
import statistics
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pyarrow.parquet as pq
import pytest
import torch

import rlvr_cli
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.commands import ei, grpo
from rlvr_cli.config import config_of
from rlvr_cli.config.ei import EiConfig
from rlvr_cli.config.grpo import GrpoConfig, LossType
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.language import language_share
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.tokens.tokenization import collate
from rlvr_cli.runs.readers import read_rollouts, read_run
from rlvr_cli.training.losses.policy_gradient import LOSSES
from rlvr_cli.training.planning.memory import compute_dtype
from rlvr_cli.training.planning.plan import clip_note
from rlvr_cli.training.updates.scores import compute_log_probs

SMALL = {
    "dataset": "arithmetic:200",
    "n_grpo_steps": 2,
    "rollout_batch_size": 32,
    "group_size": 4,
    "train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "sampling_max_tokens": 48,
    "learning_rate": 1e-3,
    "eval_examples": 8,
    "run": "r",
}


@pytest.fixture
def train(tmp_path):
    """Run GRPO with these options beside SMALL; the rows of the run, and its metrics: (phase, name) -> {step: value}."""

    def run(**given):
        grpo.run(GrpoConfig(**{**SMALL, **given, "runs_dir": str(tmp_path)}))
        made = tmp_path / given.get("run", "r")
        return rows_of(made), metrics_of(made)

    return run


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


def test_every_response_is_stored_with_its_groups_advantage(train, tmp_path):
    rows, metrics = train(n_grpo_steps=3, eval_every=2)
    assert {r["step"] for r in rows} == {0, 1, 2}
    groups = groups_of(rows)
    assert len(groups) == 3 * 8
    assert {len(group) for group in groups.values()} == {4}
    for group in groups.values():
        rewards = [r["reward"] for r in group]
        spread = statistics.stdev(rewards)
        for row in group:
            expected = (row["reward"] - statistics.mean(rewards)) / (spread + 1e-6) if spread else 0.0
            assert row["advantage"] == pytest.approx(expected, abs=1e-9)
            assert row["policy_version"] == row["step"]
            assert len(row["sampled_logprobs"]) == len(row["response_ids"]) == row["num_response_tokens"]
    first = [r for r in rows if r["step"] == 0]
    assert metrics["train", "reward/mean"][0] == pytest.approx(statistics.mean(r["reward"] for r in first))
    signal = statistics.mean(len({r["reward"] for r in g}) > 1 for k, g in groups.items() if k[0] == 0)
    assert metrics["train", "groups/signal_share"][0] == signal
    assert {r["step"] for r in rows_of(tmp_path / "r", "eval")} == {0, 2, 3}
    assert read_run(tmp_path / "r").metadata["status"] == "finished"
    assert read_run(tmp_path / "r").metadata["updates"] == 3
    assert load_policy(tmp_path / "r/model").model.num_parameters() == 436_480
    clock = pq.read_table(read_run(tmp_path / "r").metrics).to_pylist()
    walls = {r["step"]: r["wall_seconds"] for r in clock if (r["phase"], r["name"]) == ("train", "loss/objective")}
    assert walls[0] < walls[1] < walls[2], "several steps' metrics are committed together, but have their own time"


def test_every_metric_of_an_update_is_there(train):
    _, metrics = train(
        n_grpo_steps=1, rollout_batch_size=64, epochs_per_rollout_batch=2, loss_type="grpo_clip", kl_coef=0.1
    )
    wanted = {
        *("loss/objective", "loss/nll", "optimizer/grad_norm", "policy/entropy", "policy/kl", "policy/clip_fraction"),
        *("policy/clip_fraction_low", "policy/clip_fraction_high", "policy/ratio_p01", "policy/ratio_p99", "policy/ratio_max"),
        *("mismatch/logprob_mean_abs", "mismatch/logprob_max_abs", "mismatch/ratio_mean"),
        *("update/seconds", "update/tokens", "update/padding", "update/skipped"),
    }  # fmt: skip
    for name in wanted:
        assert set(metrics["train", name]) == {0, 1, 2, 3}, name
    once = {
        *("reward/mean", "reward/format", "reward/answer", "reward/grade_errors", "length/mean", "length/truncated_share"),
        *("groups/signal_share", "sampling/tokens_per_second", "sampling/seconds", "grading/seconds", "scoring/seconds"),
        *("step/seconds", "weight_sync/seconds", "entropy/mean"),
    }  # fmt: skip
    for name in once:
        assert set(metrics["train", name]) == {0}, name


def test_what_was_sampled_is_trained_on_and_not_what_its_text_tokenizes_to(
    train, tmp_path, tiny_model_dir, tiny_tokenizer
):
    """A random model samples ids that no tokenizer would choose for their text."""
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps({"question": f"{i}?", "answer": "7"}) + "\n" for i in range(9))
    )
    (tmp_path / "mine.py").write_text(
        "def grade(response, truth):\n"
        "    reward = float(len(response) % 2)\n"
        "    return {'format_reward': 1.0, 'answer_reward': reward, 'reward': reward}\n"
    )
    rows, metrics = train(
        model=str(tiny_model_dir), dataset=str(tmp_path / "d.jsonl"), prompt="question_only", grader=f"{tmp_path / 'mine.py'}:grade",
        n_grpo_steps=1, sampling_max_tokens=24,
    )  # fmt: skip
    again = [tiny_tokenizer(r["response"], add_special_tokens=False).input_ids for r in rows]
    assert sum(map(len, again)) != sum(r["num_response_tokens"] for r in rows)
    assert metrics["train", "update/tokens"][0] == sum(r["num_response_tokens"] for r in rows)
    sampled = [x for r in rows for x in r["sampled_logprobs"]]
    assert metrics["train", "loss/nll"][0] == pytest.approx(
        -statistics.mean(sampled), abs=0.02
    )  # but for barred tokens


def test_old_log_probs_are_those_before_the_first_update_on_a_batch(train):
    _, metrics = train(rollout_batch_size=64, epochs_per_rollout_batch=2, loss_type="grpo_clip", learning_rate=3e-3)
    low, high = metrics["train", "policy/ratio_min"], metrics["train", "policy/ratio_max"]
    assert set(low) == set(range(8))
    for step in range(8):  # four updates a batch
        if step % 4 == 0:
            assert (low[step], high[step]) == (1.0, 1.0)
        else:
            assert low[step] < 1 < high[step]
    assert max(metrics["train", "policy/clip_fraction"].values()) > 0
    # The sampler is compared with the policy that it sampled from, in every update on its rollouts.
    assert max(metrics["train", "mismatch/logprob_mean_abs"].values()) < 1e-3


def test_on_policy_every_ratio_is_one(train):
    _, metrics = train(loss_type="grpo_clip", n_grpo_steps=2)
    assert set(metrics["train", "policy/ratio_max"].values()) == {1.0}
    assert set(metrics["train", "policy/clip_fraction"].values()) == {0.0}


def test_the_kl_penalty_compares_with_the_model_that_training_started_from(train):
    _, metrics = train(kl_coef=0.1, n_grpo_steps=3)
    kl = metrics["train", "policy/kl"]
    assert kl[0] == 0
    assert kl[1] > 0
    assert kl[2] > 0


def test_sampling_ahead_lags_one_batch_behind_and_is_corrected_for(forked, train):
    rows, metrics = train(async_steps=1, n_grpo_steps=3, train_batch_size=16)
    by_step = defaultdict(list)
    for row in rows:
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
    weights = metrics["train", "mismatch/importance_weight_mean"]
    assert weights[0] == pytest.approx(1, abs=1e-4)
    assert weights[2] != pytest.approx(1, abs=1e-4)
    assert metrics["train", "sampling/lag"] == {0: 0, 2: 2, 4: 2}
    assert metrics["train", "sampling/waiting_seconds"].keys() == {0, 2, 4}


def test_no_sampling_process_outlives_a_trainer_that_could_not_be_opened(train, tmp_path):
    train(async_steps=1, n_grpo_steps=1, checkpoint_every=1)
    (tmp_path / "r/checkpoints").rename(tmp_path / "elsewhere")
    (tmp_path / "r/checkpoints").symlink_to(tmp_path / "elsewhere")
    given = {"resume": "r", "n_grpo_steps": 2, "runs_dir": str(tmp_path)}
    with pytest.raises(RlvrError, match="link"):
        grpo.run(resolve(GrpoConfig, flags=given, command="grpo"))
    children = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    assert not any(b"rlvr_cli.samplers.parallel.serve" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children)


def test_the_reference_is_the_model_at_the_start(train):
    _, metrics = train(kl_coef=0.5, n_grpo_steps=3)
    kl = metrics["train", "policy/kl"]
    assert kl[0] == pytest.approx(0, abs=1e-9)
    assert kl[1] > 0
    assert kl[2] > 0


def test_no_baseline_weighs_by_the_reward_itself(train):
    rows, _ = train(loss_type="no_baseline", n_grpo_steps=1)
    assert all(row["advantage"] == row["reward"] for row in rows)
    assert {row["reward"] for row in rows} == {0.0, 1.0}


def test_without_std_normalization_advantages_are_differences(train):
    rows, _ = train(use_std_normalization=False, n_grpo_steps=1)
    for group in groups_of(rows).values():
        mean = statistics.mean(r["reward"] for r in group)
        assert [r["advantage"] for r in group] == pytest.approx([r["reward"] - mean for r in group])


def test_dynamic_sampling_trains_on_groups_with_a_signal_and_counts_what_they_cost(train):
    rows, metrics = train(dynamic_sampling=True, n_grpo_steps=2, group_size=2)
    for step in (0, 1):
        groups = [g for (at, _), g in groups_of(rows).items() if at == step]
        with_signal = [g for g in groups if len({r["reward"] for r in g}) > 1]
        assert metrics["train", "groups/sampled"][step] == len(groups)
        assert metrics["train", "groups/used"][step] == len(with_signal) == 16
        assert metrics["train", "update/rows"][step] == 32
        assert metrics["train", "reward/samples"][step] == len(groups) * 2
    assert max(metrics["train", "sampling/rounds"].values()) > 1
    assert len({r["example_id"] for r in rows}) == len(groups_of(rows))  # 200 questions: none is asked twice yet


def test_dynamic_sampling_gives_up_after_its_rounds(train, tmp_path):
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps({"question": f"{i}?", "answer": "never"}) + "\n" for i in range(50))
    )
    before = load_policy("rlvr_cli/assets/tiny-math").model.state_dict()
    rows, metrics = train(
        dataset=str(tmp_path / "d.jsonl"), dynamic_sampling=True, max_sampling_rounds=2, sampling_max_tokens=8
    )
    assert metrics["train", "groups/used"] == {0: 0, 1: 0}
    assert metrics["train", "groups/sampled"] == {0: 16, 1: 16}
    assert metrics["train", "update/skipped"] == {0: 1, 1: 1}
    assert len(rows) == 2 * 16 * 4
    after = load_policy(tmp_path / "r/model").model.state_dict()
    assert all((before[name] == after[name]).all() for name in before)


def test_a_soft_penalty_falls_on_what_runs_into_the_limit(train):
    rows, _ = train(
        overlong="soft_punish", overlong_buffer=16, sampling_max_tokens=32, use_std_normalization=False, n_grpo_steps=1
    )
    for group in groups_of(rows).values():
        shaped = [r["reward"] - min(max((r["num_response_tokens"] - 16) / 16, 0), 1) for r in group]
        mean = statistics.mean(shaped)
        assert [r["advantage"] for r in group] == pytest.approx([x - mean for x in shaped], abs=1e-9)
    assert any(r["num_response_tokens"] > 16 for r in rows)


def test_masked_responses_are_not_trained_on(train):
    rows, metrics = train(overlong="mask", sampling_max_tokens=12, n_grpo_steps=1)
    whole = [r for r in rows if r["finish_reason"] != "length"]
    assert 0 < len(whole) < len(rows)
    assert metrics["train", "update/tokens"][0] == sum(r["num_response_tokens"] for r in whole)


def test_a_failed_grade_counts_as_nothing_and_is_counted(train, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def grade(response, truth):\n"
        "    if truth in '0123': raise KeyError(truth)\n"
        "    return {'format_reward': 1.0, 'answer_reward': float(len(response) % 2), 'reward': float(len(response) % 2)}\n"
    )
    rows, metrics = train(grader=f"{tmp_path / 'mine.py'}:grade", n_grpo_steps=1, max_grade_errors=1)
    failed = [r for r in rows if r["grade_error"]]
    assert failed
    assert {(r["reward"], r["advantage"]) for r in failed} == {(None, 0.0)}
    assert metrics["train", "reward/grade_errors"][0] == len(failed)


def slow(given):
    return pytest.param(given, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "given",
    [
        slow({}),
        {"loss_type": "grpo_clip", "train_batch_size": 64, "epochs_per_rollout_batch": 2, "n_grpo_steps": 6, "learning_rate": 4e-4},
        slow({"loss_type": "no_baseline"}),
        slow({"length_normalization": "masked_normalize", "importance_correction": "truncated", "use_std_normalization": False}),
        slow({"loss_type": "gspo", "train_batch_size": 32, "n_grpo_steps": 6, "learning_rate": 4e-4, "std_normalization": "batch"}),
        slow({"loss_type": "cispo", "train_batch_size": 32, "n_grpo_steps": 6, "learning_rate": 4e-4, "length_normalization": "token_mean"}),
        slow({"loss_type": "kimi", "train_batch_size": 32, "n_grpo_steps": 6, "learning_rate": 2e-4, "std_normalization": "none"}),
    ],
    ids=["default", "off-policy", "no_baseline", "dr_grpo", "gspo", "cispo", "kimi"],
)  # fmt: skip
def test_reward_rises(train, given):
    steps = given.get("n_grpo_steps", 14)
    options = {
        "dataset": "arithmetic:2000",
        "rollout_batch_size": 128,
        "group_size": 8,
        "train_batch_size": 128,
    } | given
    _, metrics = train(**{"n_grpo_steps": steps, "eval_every": 0, "eval_examples": 128, **options})
    before, after = (metrics["eval", "reward/mean"][step] for step in sorted(metrics["eval", "reward/mean"]))
    assert after > before + 0.15


def test_expert_iteration_trains_on_correct_responses_once_each(tmp_path):
    ei.run(
        EiConfig(
            dataset="arithmetic:100", n_ei_steps=2, ei_batch_size=24, group_size=4, sft_epochs=2, train_batch_size=8, micro_batch_size=8,
            sampling_max_tokens=48, learning_rate=1e-3, eval_examples=8, runs_dir=str(tmp_path), run="r",
        )
    )  # fmt: skip
    rows, metrics = rows_of(tmp_path / "r"), metrics_of(tmp_path / "r")
    steps = sorted({r["step"] for r in rows})
    assert len(steps) == 2
    for start, end in zip(steps, [*steps[1:], read_run(tmp_path / "r").metadata["updates"]], strict=True):
        sampled = [r for r in rows if r["step"] == start]
        assert len(sampled) == 24 * 4
        distinct = {(*r["prompt_ids"], -1, *r["response_ids"]) for r in sampled if r["reward"] == 1}
        assert metrics["train", "experts/distinct"][start] == len(distinct)
        trained = sum(metrics["train", "update/rows"][step] for step in range(start, end))
        assert trained == 2 * len(distinct)
    assert {r["step"] for r in rows_of(tmp_path / "r", "eval")} == {
        *steps,
        read_run(tmp_path / "r").metadata["updates"],
    }
    assert set(metrics["train", "policy/entropy"]) == set(range(read_run(tmp_path / "r").metadata["updates"]))
    assert {r["advantage"] for r in rows} == {None}


def test_a_round_without_a_correct_response_is_said_and_passed(tmp_path, capsys):
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps({"question": f"{i}?", "answer": "never"}) + "\n" for i in range(9))
    )
    ei.run(
        EiConfig(
            dataset=str(tmp_path / "d.jsonl"), n_ei_steps=2, ei_batch_size=4, group_size=2, train_batch_size=4, sampling_max_tokens=8,
            runs_dir=str(tmp_path), run="r",
        )
    )  # fmt: skip
    assert capsys.readouterr().err.count("no response was correct") == 2
    assert metrics_of(tmp_path / "r")["train", "update/skipped"] == {0: 1, 1: 1}
    rows = rows_of(tmp_path / "r")
    assert len({(r["step"], r["example_id"]) for r in rows}) == 8
    assert read_run(tmp_path / "r").metadata["status"] == "finished"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"rollout_batch_size": 100}, "--rollout-batch-size 100 is not a multiple of --group-size 8"),
        ({"train_batch_size": 96}, "--rollout-batch-size 256 is not a multiple of --train-batch-size 96"),
        ({"train_batch_size": 64}, "--train-batch-size 64 is not a multiple of --gradient-accumulation-steps 128"),
        (
            {"train_batch_size": 4, "gradient_accumulation_steps": 1},
            "--train-batch-size 4 is smaller than --group-size 8",
        ),
        ({"sampling_temperature": 0.0}, "makes all responses of a group identical"),
        ({"time_limit": "4 hours"}, "--time-limit"),
        ({"eval_top_p": 0.0}, "--eval-top-p"),
        ({"cliprange": 0.0}, "--cliprange"),
        ({"eval_max_tokens": 2}, "Evaluation responses need at least 4 tokens but may have at most 2"),
        ({"kl_coef": -1.0}, "--kl-coef"),
        ({"async_steps": 2}, "--async-steps is 2"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(given, problem):
    with pytest.raises(RlvrError, match=problem) as refused:
        GrpoConfig(**given)
    assert refused.value.hint or "must" in refused.value.problem


def test_a_group_of_one_needs_a_loss_without_a_baseline(tmp_path, capsys, own_losses):
    flags = {"group_size": 1, "runs_dir": str(tmp_path / "runs"), "dry_run": True}
    for loss_type in ("reinforce_with_baseline", f"{own_losses}:clip"):
        with pytest.raises(RlvrError, match="--group-size 1 every advantage is 0") as refused:
            grpo.run(GrpoConfig(**flags, loss_type=loss_type))
        assert refused.value.hint == "Use --group-size 8, or --loss-type no_baseline."
    grpo.run(GrpoConfig(**flags, loss_type="no_baseline"))
    assert "advantage      A_i = r_i\n" in capsys.readouterr().err


def test_too_few_questions_for_a_batch(tmp_path):
    with pytest.raises(RlvrError, match="needs 32 different questions; arithmetic:20:0 has 20"):
        grpo.run(GrpoConfig(dataset="arithmetic:20", runs_dir=str(tmp_path)))
    assert not list(tmp_path.iterdir())


def test_time_limits_are_read():
    given = {"4h": 14400, "90m": 5400, "1h30m": 5400, "45s": 45, "1.5h": 5400, "1d": 86400}
    assert {text: GrpoConfig(time_limit=text).time_limit_seconds for text in given} == given
    assert GrpoConfig().time_limit_seconds == float("inf")
    with pytest.raises(RlvrError, match="without a unit"):
        GrpoConfig(time_limit="600")
    assert GrpoConfig(time_limit="600", sources={"time_limit": "resumed run"}).time_limit_seconds == 600  # it began so


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ({"kl_type": "k2"}, {"kl_coef": 0.1}),
        ({"cispo_cap": 2.0}, {"loss_type": "cispo"}),
        ({"kimi_tau": 2.0}, {"loss_type": "kimi"}),
        ({"importance_cap": 3.0}, {"importance_correction": "truncated"}),
        ({"importance_floor": 0.5}, {"async_steps": 1}),
        ({"max_sampling_rounds": 3}, {"dynamic_sampling": True}),
        ({"overlong_buffer": 5}, {"overlong": "soft_punish"}),
        ({"length_reward_after": 5}, {"length_reward": 0.5}),
        ({"language": "de"}, {"language_reward": 0.5}),
        ({"language_detector": "py3langid"}, {"language_reward": 0.5}),
    ],
)
def test_an_option_without_effect_is_refused(given, needed):
    (name,) = given
    with pytest.raises(RlvrError, match=f"--{name.replace('_', '-')} has no effect without --"):
        resolve(GrpoConfig, flags=given, command="grpo")
    assert getattr(resolve(GrpoConfig, flags={**given, **needed}, command="grpo"), name) == given[name]


PRESETS = Path(rlvr_cli.__file__).parent / "config" / "presets"


@pytest.mark.parametrize("name", sorted(file.stem for file in PRESETS.glob("*.toml")))
def test_presets_are_options_and_each_line_says_where_it_comes_from(name):
    file = PRESETS / f"{name}.toml"
    for line in file.read_text().splitlines():
        assert not line or line.startswith(("#", "[")) or " # " in line, line
    tables = [line[1:-1] for line in file.read_text().splitlines() if line.startswith("[")]
    assert tables
    for command in tables:
        config = resolve(config_of(command), flags={"preset": name, "seed": 7}, command=command)
        assert config.preset == name
        assert config.seed == 7
        assert f"preset {name}" in config.sources.values()


def test_a_flag_beats_a_file_beats_a_preset(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("cliprange_high = 0.3\ngroup_size = 4\n")
    flags = {"preset": "dapo", "config": str(file), "group_size": 8}
    config = resolve(GrpoConfig, flags=flags, command="grpo")
    assert (config.group_size, config.cliprange_high, config.length_normalization) == (8, 0.3, "token_mean")
    assert config.sources["group_size"] == "flag"
    assert config.sources["cliprange_high"] == f"config {file}"
    assert config.sources["length_normalization"] == "preset dapo"
    assert config.sources["seed"] == "default"
    file.write_text('preset = "dr-grpo"\n')
    assert resolve(GrpoConfig, flags={"config": str(file)}, command="grpo").use_std_normalization is False
    with pytest.raises(RlvrError, match="no preset 'dapo'"):
        resolve(config_of("sft"), flags={"preset": "dapo"}, command="sft")


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("normalization", ["masked_mean", "masked_normalize", "token_mean"])
def test_a_dry_run_says_the_objective_and_does_nothing(tmp_path, capsys, loss_type, normalization):
    config = GrpoConfig(
        loss_type=loss_type, length_normalization=normalization, cliprange_high=0.28, kl_coef=0.1, runs_dir=str(tmp_path), dry_run=True
    )  # fmt: skip
    loss = LOSSES[loss_type]
    if loss_type == "gspo" and normalization != "masked_mean":
        with pytest.raises(RlvrError, match=f"--length-normalization {normalization} does not go with gspo") as refused:
            grpo.run(config)
        assert refused.value.hint == "Use --length-normalization masked_mean."
        return
    grpo.run(config)
    said = capsys.readouterr().err
    objective = next(line for line in said.splitlines() if line.startswith("objective"))
    by_hand = {
        "no_baseline": "A_i log p",
        "reinforce_with_baseline": "A_i log p",
        "grpo_clip": "1+0.28",
        "grpo_no_clip": "rho_i,t A_i",
        "gspo": "clip(s_i,t, 1-0.0003, 1+0.28)",
        "cispo": "min(rho_i,t, 5) A_i log p",
        "kimi": "A_i log p_i - (0.1/2) (log p_i - log p_old,i)^2",
    }
    formula = loss.formula(**{name: getattr(config, name) for name in loss.options})
    assert formula.removeprefix("-") in objective
    assert by_hand.get(loss_type, "") in objective
    assert loss.where in objective
    scales = {"masked_mean": "(1/|o_i|)", "masked_normalize": "(1/(256*1024))", "token_mean": "(1/T)"}
    assert ("(1/256) sum_i [" if loss.per_row else scales[normalization]) in objective
    assert f"0.1 {'mean_t ' if loss.per_row else ''}k3(p_ref, p)" in objective
    assert (
        "KL penalty     k3(p_ref, p) = exp(d) - d - 1, d = log p_ref - log p; its gradient descends KL(p_ref || p)\n"
        in said
    )
    assert "memory         about" in said
    assert "on-policy" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "precision"),
    [
        ({}, "float32 weights and optimizer state; computes in float32"),
        ({"compute_dtype": "bfloat16"}, "float32 weights and optimizer state; computes in bfloat16"),
        ({"param_dtype": "bfloat16"}, "bfloat16 weights and optimizer state; computes in bfloat16"),
        ({"optimizer": "adamw_8bit"}, "float32 weights, moments of 8 bits; computes in float32"),
        ({"offload_optimizer": True}, "float32 weights, on the host float32 moments; computes in float32"),
        (
            {"param_dtype": "bfloat16", "offload_optimizer": True},
            "bfloat16 weights, on the host float32 weights and moments; computes in bfloat16",
        ),
    ],
)
def test_a_dry_run_says_the_precision(tmp_path, capsys, given, precision):
    given = {"device": "cpu"} | given
    grpo.run(GrpoConfig(**given, engine="transformers", runs_dir=str(tmp_path), dry_run=True))
    assert f"precision      {precision}\n" in capsys.readouterr().err


def test_on_a_gpu_products_are_in_bfloat16_unless_asked_for():
    assert compute_dtype(GrpoConfig(), "cuda:1") == torch.bfloat16
    assert compute_dtype(GrpoConfig(compute_dtype="float32"), "cuda:1") == torch.float32
    assert compute_dtype(GrpoConfig(), "cpu") == torch.float32


def notes_of(capsys, tmp_path, **given):
    """The notes of a dry run."""
    grpo.run(GrpoConfig(**given, runs_dir=str(tmp_path / "runs"), dry_run=True))
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("note:")]


@pytest.mark.parametrize(
    ("given", "noted"),
    [({}, True), ({"optimizer": "adamw_kahan"}, False), ({"optimizer": "adamw_8bit"}, False), ({"offload_optimizer": True}, False)],
)  # fmt: skip
def test_the_plan_notes_steps_that_bfloat16_rounds_away(tmp_path, capsys, given, noted):
    said = notes_of(capsys, tmp_path, param_dtype="bfloat16", **given)
    assert any("rounded away" in note for note in said) is noted


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_plan_notes_what_a_loss_does_about_ratios(tmp_path, capsys, loss_type):
    loss = LOSSES[loss_type]
    on_policy = notes_of(capsys, tmp_path, loss_type=loss_type)
    off_policy = notes_of(capsys, tmp_path, loss_type=loss_type, epochs_per_rollout_batch=2)
    pointless = f"note: on-policy, every ratio is 1: {loss_type} has the same gradient as reinforce_with_baseline"
    uncorrected = f"note: {loss_type} does not correct for off-policy updates; grpo_clip does"
    summed = " with --length-normalization masked_normalize --normalize-constant 1" if loss.per_row else ""
    own = ["note: kimi is defined for rewards that are only centered; --std-normalization none does not divide them"]
    own *= loss_type == "kimi"
    assert on_policy == [pointless + summed] * bool(loss.uses_ratio) + own
    assert off_policy == [uncorrected] * (not loss.uses_ratio) + own
    dropped = notes_of(capsys, tmp_path, loss_type=loss_type, dynamic_sampling=True)
    assert any(f"{loss_type} could also learn from all-correct groups" in note for note in dropped) == loss.raw_rewards


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "advantage      A_i = (r_i - mean(r)) / (std(r) + 1e-06); 0 where all r are equal"),
        ({"std_normalization": "none"}, "advantage      A_i = r_i - mean(r)"),
        (
            {"std_normalization": "batch"},
            "advantage      A_i = (r_i - mean(r)) / (std of r_i - mean(r) over the batch + 1e-06)",
        ),
        ({"format_weight": 1.0}, "shaped reward  R_i = r_i + 1 format_i"),
        ({"format_weight": 1.0}, "advantage      A_i = (R_i - mean(R)) / (std(R) + 1e-06); 0 where all R are equal"),
        (
            {"length_reward": 0.5, "length_reward_after": 3},
            "shaped reward  R_i = r_i + 0.5 (1/2 - (|o_i| - min)/(max - min), at most 0 if wrong) from batch 3 on",
        ),
        ({"language_reward": 0.1}, "shaped reward  R_i = r_i + 0.1 (share of words in en, by script)"),
        ({"overlong": "soft_punish", "loss_type": "no_baseline"}, "advantage      A_i = R_i"),
        (
            {"overlong": "soft_punish", "format_weight": 1.0, "sampling_max_tokens": 100},
            "shaped reward  R_i = r_i + 1 format_i - min(max((|o_i| - 80)/20, 0), 1)",
        ),
        (
            {"kl_coef": 0.1, "kl_type": "k2"},
            "KL penalty     k2(p_ref, p) = d^2/2, d = log p_ref - log p; its gradient descends KL(p || p_ref)",
        ),
        (
            {"kl_coef": 0.1, "kl_type": "unbiased"},
            "KL penalty     rho k3(p_ref, p) = rho (exp(d) - d - 1), rho = p/p_old; its gradient descends KL(p || p_ref)",
        ),
    ],
)
def test_the_plan_says_rewards_advantages_and_divergence_as_formulas(tmp_path, capsys, given, line):
    grpo.run(GrpoConfig(**given, runs_dir=str(tmp_path / "runs"), dry_run=True))
    assert line in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("given", "weight"),
    [
        ({"importance_correction": "truncated"}, "min(c, 2) A_i"),
        ({"importance_correction": "truncated", "importance_floor": 0.5}, "min(max(c, 0.5), 2) A_i"),
        ({"importance_correction": "masked", "importance_floor": 0.5, "importance_cap": 5.0}, "c [0.5 <= c <= 5] A_i"),
    ],
)
def test_the_plan_says_the_importance_correction(tmp_path, capsys, given, weight):
    grpo.run(GrpoConfig(**given, runs_dir=str(tmp_path / "runs"), dry_run=True))
    objective = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("objective"))
    assert weight in objective
    assert "c = p_trainer/p_sampler" in objective


def test_the_plan_warns_of_length_rewards_divided_by_their_own_deviation(tmp_path, capsys):
    for over, noted in (("group", True), ("batch", False), ("none", False)):
        said = notes_of(capsys, tmp_path, length_reward=0.5, std_normalization=over)
        assert any("standard deviation is that of the length rewards alone" in note for note in said) == noted
    for size, note in ((8, None), (1, "with --group-size 1 it has no effect")):  # without a baseline nothing is divided
        said = notes_of(capsys, tmp_path, length_reward=0.5, loss_type="no_baseline", group_size=size)
        assert [each.rpartition(": ")[2] for each in said if "length" in each] == [note] * (note is not None)


@pytest.mark.parametrize(
    ("given", "found", "said"),
    [
        (
            {"loss_type": "gspo", "cliprange": 0.2},
            (0.99, 1.015),
            "the clip range of gspo, 1-0.2 to 1+0.2 in units of the ratio, has no effect",
        ),
        ({"loss_type": "gspo"}, (0.999, 1.002), None),
        (
            {"loss_type": "gspo"},
            (0.99, 1.02),
            "the clip range of gspo, 1-0.0003 to 1+0.0004 in units of the ratio, cuts almost all",
        ),
        (
            {"loss_type": "grpo_clip", "cliprange": 3e-4},
            (0.9, 1.1),
            "the clip range of grpo_clip, 1-0.0003 to 1+0.0003",
        ),
        ({"loss_type": "grpo_clip", "cliprange": 3e-4}, (0.9, 1.002), None),
        ({"loss_type": "grpo_clip"}, (0.97, 1.01), None),
        ({"loss_type": "grpo_clip"}, (0.99, 1.01), "the clip range of grpo_clip, 1-0.2 to 1+0.2"),
        ({"loss_type": "cispo"}, (0.99, 1.01), None),
    ],
)
def test_a_clip_range_that_cuts_nothing_or_almost_all_is_noted(given, found, said):
    least, most = found
    update = {f"policy/ratio_{name}": least for name in ("min", "p01")} | {
        f"policy/ratio_{name}": most for name in ("p99", "max")
    }
    config, loss = GrpoConfig(**given), LOSSES[given["loss_type"]]
    note = clip_note(config, update | {"policy/clip_fraction": 0.4}, loss=loss)
    assert note is None if said is None else note is not None and note.startswith(said)
    nothing = clip_note(config, update | {"policy/clip_fraction": 0.0}, loss=loss)  # no response has an advantage
    assert nothing is None or "cuts" not in nothing


def test_the_clip_range_is_looked_at_once_after_the_first_update_that_moves_ratios(train, capsys):
    how = {"train_batch_size": 16, "n_grpo_steps": 2}
    train(loss_type="gspo", cliprange=50.0, **how)
    assert capsys.readouterr().err.count("has no effect: ratios are 0.") == 1
    train(loss_type="grpo_clip", cliprange=1e-7, learning_rate=3e-3, run="narrow", **how)
    assert capsys.readouterr().err.count("cuts almost all that moves") == 1
    train(loss_type="grpo_clip", learning_rate=3e-3, run="default", **how)
    assert "clip range" not in capsys.readouterr().err


def test_the_clip_range_is_looked_at_where_something_has_an_advantage(train, tmp_path, capsys):
    """Most updates have responses without an advantage only; the first one whose ratios moved is one of them."""
    (tmp_path / "odd.py").write_text(
        "def grade(response, truth):\n    return float(len(response) % 2) if truth in '0246' else 0.0\n"
    )
    _, metrics = train(
        loss_type="grpo_clip", cliprange=1e-7, learning_rate=3e-3, group_size=2, train_batch_size=2, n_grpo_steps=1, seed=1,
        grader=f"{tmp_path / 'odd.py'}:grade",
    )  # fmt: skip
    cut, least, most = (metrics["train", f"policy/{n}"] for n in ("clip_fraction", "ratio_min", "ratio_max"))
    moved = [step for step in sorted(least) if least[step] < most[step]]
    assert cut[moved[0]] == 0
    assert any(cut[step] for step in moved)
    assert capsys.readouterr().err.count("cuts almost all that moves") == 1


TERMS = ("format_term", "length_term", "language_term", "overlong_term")


def test_advantages_are_made_of_the_shaped_reward_and_each_term_has_a_column(train, tmp_path):
    rows, metrics = train(
        format_weight=0.5, length_reward=0.4, length_reward_after=1, language_reward=0.3, language="zh", overlong="soft_punish",
        overlong_buffer=16, sampling_max_tokens=32, use_std_normalization=False, n_grpo_steps=2, std_normalization="none",
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
    assert metrics["train", "reward/shaped"][0] == pytest.approx(
        statistics.mean(r["shaped_reward"] for r in rows if r["step"] == 0)
    )
    held_out = rows_of(tmp_path / "r", "eval")
    assert {r[name] for r in held_out for name in ("shaped_reward", *TERMS)} == {None}
    with open_runs([read_run(tmp_path / "r")]) as database:
        sums = "abs(reward + format_term + length_term + language_term + overlong_term - shaped_reward)"
        (row,) = database.select(f"select max({sums}), count(shaped_reward) from rollouts").rows
    assert row[0] < 1e-12
    assert row[1] == len(rows)


def test_without_terms_the_shaped_reward_is_the_reward(train):
    rows, metrics = train(n_grpo_steps=1)
    assert all(r["shaped_reward"] == r["reward"] for r in rows)
    assert {r[name] for r in rows for name in TERMS} == {None}
    assert ("train", "reward/shaped") not in metrics


def test_over_the_batch_advantages_have_one_scale(train):
    """The objective on-policy: that of the centered rewards, divided by one number, that of the rows."""
    how = {"n_grpo_steps": 1, "rollout_batch_size": 32, "eval_every": 0, "advantage_eps": 0.25}
    rows, metrics = train(std_normalization="none", **how)
    _, divided = train(std_normalization="batch", run="batch", **how)
    scale = statistics.stdev(r["advantage"] for r in rows) + 0.25
    for name in ("loss/objective", "optimizer/grad_norm"):
        assert divided["train", name][0] == pytest.approx(metrics["train", name][0] / scale, rel=1e-5), name


def test_raw_rewards_stay_what_they_are(train):
    how = {"loss_type": "no_baseline", "n_grpo_steps": 1, "eval_every": 0}
    _, metrics = train(**how)
    _, divided = train(std_normalization="batch", run="batch", **how)
    for name in ("loss/objective", "optimizer/grad_norm"):
        assert divided["train", name] == metrics["train", name]


def test_a_missing_language_detector_is_named_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RlvrError, match="py3langid is not installed"):
        grpo.run(GrpoConfig(language_reward=0.1, language_detector="py3langid", runs_dir=str(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()


def test_the_plan_claims_nothing_about_the_ratios_of_a_users_loss(tmp_path, capsys, own_losses):
    for epochs in (1, 2):
        assert notes_of(capsys, tmp_path, loss_type=f"{own_losses}:clip", epochs_per_rollout_batch=epochs) == []


def test_a_run_out_of_time_keeps_what_it_has_learned(tmp_path):
    options = {**SMALL, "n_grpo_steps": 500, "time_limit": "4s", "checkpoint_every": 1000, "runs_dir": str(tmp_path)}
    grpo.run(GrpoConfig(**options))
    updates = read_run(tmp_path / "r").metadata["updates"]
    assert 0 < updates < 500
    model = (tmp_path / "r/model/model.safetensors").read_bytes()
    grpo.run(resolve(GrpoConfig, flags={"resume": "r", "runs_dir": str(tmp_path)}, command="grpo"))
    assert read_run(tmp_path / "r").metadata["updates"] == updates
    assert (tmp_path / "r/model/model.safetensors").read_bytes() == model


def test_a_prompt_that_does_not_fit_is_named_before_anything_is_sampled(tmp_path):
    rows = [{"question": "What is the last digit of 1+1+1+1+1?", "answer": "5"}] * 8 + [
        {"question": "long " * 5000, "answer": "5"}
    ]
    (tmp_path / "e.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(RlvrError, match=r"Question e-9 has a prompt of \d+ tokens; with 48 for the response"):
        grpo.run(
            GrpoConfig(
                **{**SMALL, "eval_dataset": str(tmp_path / "e.jsonl"), "eval_examples": 9, "runs_dir": str(tmp_path)}
            )
        )
    assert not list((tmp_path / "r/rollouts").iterdir())


def test_evaluations_are_due_though_no_group_has_a_signal(train, tmp_path):
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps({"question": f"{i}?", "answer": "never"}) + "\n" for i in range(50))
    )
    given = {"dataset": str(tmp_path / "d.jsonl"), "eval_dataset": str(tmp_path / "d.jsonl"), "eval_every": 1}
    train(**given, dynamic_sampling=True, max_sampling_rounds=1, sampling_max_tokens=8)
    assert {r["step"] for r in rows_of(tmp_path / "r", "eval")} == {0, 1, 2}


def test_the_number_of_steps_is_fixed_by_a_cosine(tmp_path):
    grpo.run(GrpoConfig(**{**SMALL, "lr_schedule": "cosine", "n_grpo_steps": 1, "runs_dir": str(tmp_path)}))
    given = {"resume": "r", "n_grpo_steps": 2, "runs_dir": str(tmp_path)}
    with pytest.raises(RlvrError, match="cosine learning-rate schedule for --n-grpo-steps 1"):
        grpo.run(resolve(GrpoConfig, flags=given, command="grpo"))


def test_what_is_given_beside_resume_is_checked_with_the_runs_own_options(tmp_path):
    grpo.run(GrpoConfig(**{**SMALL, "train_batch_size": 16, "n_grpo_steps": 1, "runs_dir": str(tmp_path)}))
    given = {"resume": "r", "gradient_accumulation_steps": 4, "n_grpo_steps": 2, "runs_dir": str(tmp_path)}
    grpo.run(resolve(GrpoConfig, flags=given, command="grpo"))
    assert read_run(tmp_path / "r").metadata["updates"] == 4
    given["gradient_accumulation_steps"] = 3
    with pytest.raises(RlvrError, match="--train-batch-size 16 is not a multiple of --gradient-accumulation-steps 3"):
        grpo.run(resolve(GrpoConfig, flags=given, command="grpo"))


def test_a_model_that_was_moved_is_the_same_model(tmp_path):
    shutil.copytree("rlvr_cli/assets/tiny-math", tmp_path / "here")
    grpo.run(GrpoConfig(**{**SMALL, "model": str(tmp_path / "here"), "n_grpo_steps": 1, "runs_dir": str(tmp_path)}))
    (tmp_path / "here").rename(tmp_path / "there")
    given = {"resume": "r", "model": str(tmp_path / "there"), "n_grpo_steps": 2, "runs_dir": str(tmp_path)}
    grpo.run(resolve(GrpoConfig, flags=given, command="grpo"))
    assert read_run(tmp_path / "r").metadata["updates"] == 2
    config = tmp_path / "there/tokenizer_config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(RlvrError, match="its model tokenizer_sha256 was"):
        grpo.run(resolve(GrpoConfig, flags=given, command="grpo"))


def test_training_and_evaluation_have_one_grader(tmp_path):
    with pytest.raises(RlvrError, match=r"arithmetic:200:0 is graded by r1_zero, and countdown by countdown"):
        grpo.run(GrpoConfig(**{**SMALL, "eval_dataset": "countdown", "runs_dir": str(tmp_path)}))


def test_fields_are_named_for_both_files(tmp_path):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"q": f"{i}?", "a": "7"}) + "\n" for i in range(40)))
    file = str(tmp_path / "d.jsonl")
    named = {"dataset": file, "eval_dataset": file, "question_field": "q", "answer_field": "a"}
    grpo.run(GrpoConfig(**{**SMALL, **named, "n_grpo_steps": 1, "runs_dir": str(tmp_path)}))
    assert read_run(tmp_path / "r").metadata["status"] == "finished"


def test_the_clock_goes_on_with_the_updates_of_a_batch(tmp_path):
    """A batch's own seconds are known after its last update, and stand at its first one."""
    given = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "loss_type": "grpo_clip",
        "runs_dir": str(tmp_path),
    }
    grpo.run(GrpoConfig(**{**SMALL, **given}))
    with open_runs([read_run(tmp_path / "r")]) as database:
        for query, column in (("curves", "wall_seconds"), ("progress", "minutes")):
            clock = [row[column] for row in database.select(named_queries()[query].sql).records()]
            assert len(clock) == 9
            assert clock == sorted(clock), query


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("adapter", [{}, {"lora_rank": 16, "learning_rate": 4e-3}], ids=["weights", "adapter"])
def test_on_vllm_reward_rises_too_and_a_resumed_run_ends_the_same(tmp_path, adapter):
    options = {
        **SMALL, "engine": "vllm", "max_model_len": 128, "dataset": "arithmetic:2000", "rollout_batch_size": 128, "group_size": 8,
        "train_batch_size": 64, "epochs_per_rollout_batch": 2, "loss_type": "grpo_clip", "n_grpo_steps": 5, "learning_rate": 4e-4,
        "eval_every": 0, "eval_examples": 128, "runs_dir": str(tmp_path), **adapter,
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
    given = {"resume": "cut", "n_grpo_steps": 5, "runs_dir": str(tmp_path)}
    grpo.run(resolve(GrpoConfig, flags=given, command="grpo"))
    name = "adapter_model.safetensors" if adapter else "model.safetensors"
    weights = [(tmp_path / run / "model" / name).read_bytes() for run in ("r", "cut")]
    assert weights[0] == weights[1]


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("adapter", [{}, {"lora_rank": 16, "learning_rate": 1e-2}], ids=["weights", "adapter"])
def test_vllm_samples_ahead_in_a_process_of_its_own(train, adapter):
    _, metrics = train(async_steps=1, engine="vllm", max_model_len=128, n_grpo_steps=3, **adapter)
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


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
def test_a_copy_of_a_loss_in_a_users_file_has_the_same_trajectory(tmp_path, train, own_losses, kl_coef):
    """To the last bit: tokens, metrics and weights."""
    how = {"n_grpo_steps": 3, "rollout_batch_size": 64, "learning_rate": 3e-3, "kl_coef": kl_coef}
    rows, metrics = train(loss_type="grpo_clip", **how)
    weights = (tmp_path / "r/model/model.safetensors").read_bytes()
    own_rows, own = train(loss_type=f"{own_losses}:clip", run="own", **how)
    own_rows, own = rows_of(tmp_path / "own"), metrics_of(tmp_path / "own")
    assert [r["response_ids"] for r in own_rows] == [r["response_ids"] for r in rows]
    assert (tmp_path / "own/model/model.safetensors").read_bytes() == weights
    timed = ("seconds", "per_second", "memory", "utilization")
    for key in metrics.keys() & own.keys():
        if not any(word in key[1] for word in timed):
            assert own[key] == metrics[key], key
    assert any(value > 0 for value in own["train", "policy/clip_fraction"].values())
    assert own["train", "policy/surprise_mean"] == pytest.approx(own["train", "loss/nll"])


def test_a_loss_per_row_is_the_mean_over_its_tokens(tmp_path, train, own_losses):
    """And it is told which rows are of one group: their advantages sum to 0."""
    how = {"use_std_normalization": False, "gradient_accumulation_steps": 1, "n_grpo_steps": 2}
    _, metrics = train(loss_type="reinforce_with_baseline", **how)
    train(loss_type=f"{own_losses}:per_row", run="own", **how)
    own = metrics_of(tmp_path / "own")
    assert metrics["train", "optimizer/grad_norm"][0] > 0
    for name in ("loss/objective", "optimizer/grad_norm"):
        assert own["train", name] == pytest.approx(metrics["train", name], rel=1e-4, abs=1e-7), name
    learned = [step for step, rows in own["train", "loss/denominator"].items() if rows == 32]
    assert learned == [0, 1]
    # Rows without an advantage are a micro-batch of their own; those with one have their whole group beside them.
    assert own["train", "policy/of_group_mean"][0] == 4
    assert own["train", "policy/unbalanced_mean"][0] == pytest.approx(0, abs=1e-6)


def test_a_users_loss_learns_from_responses_without_an_advantage(train, own_losses):
    """For what rlvr knows, it may have a gradient there: an entropy bonus has."""
    _, metrics = train(loss_type=f"{own_losses}:of_the_rest", n_grpo_steps=1, group_size=2)
    assert 0 < metrics["train", "groups/signal_share"][0] < 1
    assert metrics["train", "optimizer/grad_norm"][0] > 0


def test_a_run_goes_on_only_with_the_loss_that_it_began_with(tmp_path, train, own_losses):
    train(loss_type=f"{own_losses}:clip", n_grpo_steps=1)
    facts = read_run(tmp_path / "r").metadata["facts"]["loss"]
    assert facts["sha256"] == hashlib.sha256(own_losses.read_bytes()).hexdigest()
    how = {"resume": "r", "runs_dir": str(tmp_path), "n_grpo_steps": 2}
    own_losses.write_text(OWN_LOSSES + "\n# another\n")
    with pytest.raises(RlvrError, match="its loss sha256 was"):
        grpo.run(resolve(GrpoConfig, flags=how, command="grpo"))
    own_losses.write_text(OWN_LOSSES)
    grpo.run(resolve(GrpoConfig, flags=how, command="grpo"))
    assert read_run(tmp_path / "r").metadata["updates"] == 2


def test_a_users_loss_is_tried_before_anything_is_made(tmp_path, own_losses, capsys):
    own_losses.write_text(OWN_LOSSES + "def bad(inputs):\n    return inputs.log_probs.mean()\n")
    runs = tmp_path / "runs"
    line = OWN_LOSSES.count("\n") + 1
    with pytest.raises(RlvrError, match=rf"losses\.py:{line}: the loss has shape \(\)"):
        grpo.run(GrpoConfig(**{**SMALL, "loss_type": f"{own_losses}:bad", "runs_dir": str(runs)}))
    assert not runs.exists()
    assert "model" not in capsys.readouterr().err


def test_the_plan_names_a_users_loss(tmp_path, own_losses, capsys):
    def objective_of(**given):
        grpo.run(GrpoConfig(**given, runs_dir=str(tmp_path / "runs"), dry_run=True))
        return next(line for line in capsys.readouterr().err.splitlines() if line.startswith("objective"))

    assert f"      (1/256) sum_i (1/|o_i|) sum_t {own_losses}:clip;" in objective_of(loss_type=f"{own_losses}:clip")
    shown = objective_of(loss_type=f"{own_losses}:per_row", kl_coef=0.1)
    assert f"      (1/256) sum_i [{own_losses}:per_row + 0.1 mean_t k3(p_ref, p)];" in shown


def test_a_loss_per_row_says_what_has_no_effect_and_refuses_what_cannot_be(tmp_path, own_losses, capsys):
    flags = {"loss_type": f"{own_losses}:per_row", "runs_dir": str(tmp_path / "runs"), "dry_run": True}
    grpo.run(resolve(GrpoConfig, flags=flags | {"length_normalization": "token_mean"}, command="grpo"))
    assert "--length-normalization has no effect" in capsys.readouterr().err
    grpo.run(resolve(GrpoConfig, flags=flags, command="grpo"))
    assert "--length-normalization has no effect" not in capsys.readouterr().err
    for correction in ({"importance_correction": "truncated"}, {"async_steps": 1}):
        with pytest.raises(RlvrError, match="gives one loss per response"):
            grpo.run(resolve(GrpoConfig, flags=flags | correction, command="grpo"))


def test_a_loss_type_that_is_neither_a_name_nor_a_file(tmp_path):
    with pytest.raises(RlvrError, match="--loss-type is 'ppo'") as raised:
        GrpoConfig(loss_type="ppo")
    assert raised.value.hint == f"Choose one of {', '.join(get_args(LossType))}, FILE.py:FUNCTION."
