"""The options of `rlvr grpo`: which are refused, where they come from, and what the plan says of them."""

from pathlib import Path
from typing import get_args

import pytest
import torch

import rlvr_cli
from rlvr_cli.commands import grpo
from rlvr_cli.config import config_of
from rlvr_cli.config.grpo import GrpoConfig, LossType
from rlvr_cli.config.parsing.sources import resolve, resume
from rlvr_cli.errors import RlvrError
from rlvr_cli.training.losses.policy_gradient import LOSSES
from rlvr_cli.training.planning.memory import compute_dtype
from rlvr_cli.training.planning.notes import clip_note, grpo_notes, shared_notes
from rlvr_cli.training.planning.plan import grpo_plan
from rlvr_cli.training.session import load_inputs


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"rollout_batch_size": 100}, "--rollout-batch-size 100 is not a multiple of --group-size 8"),
        ({"train_batch_size": 96}, "--rollout-batch-size 256 is not a multiple of --train-batch-size 96"),
        (
            {"train_batch_size": 64, "gradient_accumulation_steps": 128},
            "--train-batch-size 64 is not a multiple of --gradient-accumulation-steps 128",
        ),
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
        (
            {"group_size": 1, "loss_type": "no_baseline", "dynamic_sampling": True},
            "a group of one has no differing rewards.\nUse --group-size 8, or --no-dynamic-sampling",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(given, problem):
    with pytest.raises(RlvrError, match=problem) as refused:
        GrpoConfig(**given)
    assert refused.value.hint or "must" in refused.value.problem


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
        ({"cliprange": 0.1}, {"loss_type": "grpo_clip"}),
        ({"cliprange_high": 0.28}, {"loss_type": "gspo"}),
        ({"normalize_constant": 7.0}, {"length_normalization": "masked_normalize"}),
        ({"importance_cap": 3.0}, {"importance_correction": "truncated"}),
        ({"importance_floor": 0.5}, {"async_steps": 1}),
        ({"max_sampling_rounds": 3}, {"dynamic_sampling": True}),
        ({"overlong_buffer": 5}, {"overlong": "soft_punish"}),
        ({"length_reward_after": 5}, {"length_reward": 0.5}),
        ({"language": "de"}, {"language_reward": 0.5}),
        ({"language_detector": "py3langid"}, {"language_reward": 0.5}),
        ({"advantage_eps": 0.1, "std_normalization": "none"}, {"std_normalization": "batch"}),
        ({"advantage_eps": 0.1, "use_std_normalization": False}, {"use_std_normalization": True}),
        ({"advantage_eps": 0.1, "loss_type": "no_baseline"}, {"loss_type": "gspo"}),
        ({"std_normalization": "batch", "loss_type": "no_baseline"}, {"loss_type": "gspo"}),
        ({"use_std_normalization": False, "loss_type": "no_baseline"}, {"loss_type": "gspo"}),
    ],
)
def test_an_option_without_effect_is_refused(given, needed):
    name = next(iter(given))
    with pytest.raises(RlvrError, match=f"--{name.replace('_', '-')} has no effect without (a )?--"):
        resolve(GrpoConfig, flags=given, command="grpo")
    assert getattr(resolve(GrpoConfig, flags={**given, **needed}, command="grpo"), name) == given[name]


@pytest.mark.parametrize("name", ["cliprange", "cliprange_high", "cispo_cap", "kimi_tau"])
@pytest.mark.parametrize("loss_type", [*LOSSES, "mine.py:loss"])
def test_an_option_of_other_losses_has_no_effect(loss_type, name):
    given = {"loss_type": loss_type, name: 2.0}
    if loss_type in LOSSES and name in LOSSES[loss_type].options:
        assert getattr(resolve(GrpoConfig, flags=given, command="grpo"), name) == 2.0
        return
    with pytest.raises(RlvrError, match=f"--{name.replace('_', '-')} has no effect without --loss-type"):
        resolve(GrpoConfig, flags=given, command="grpo")


@pytest.mark.parametrize("lag", [{"async_steps": 1}, {"partial_rollout_tokens": 256}])
@pytest.mark.parametrize("bound", [{"importance_cap": 3.0}, {"importance_floor": 0.5}])
def test_bounds_of_importance_weights_have_no_effect_without_weights(bound, lag):
    resolve(GrpoConfig, flags={**bound, **lag}, command="grpo")
    with pytest.raises(RlvrError, match="has no effect without --importance-correction truncated"):
        resolve(GrpoConfig, flags={**bound, **lag, "importance_correction": "none"}, command="grpo")


def test_a_stored_option_without_effect_is_not_refused_on_resume():
    given = {"cliprange": 0.1, "normalize_constant": 7.0}
    stored = {"loss_type": "no_baseline", "length_normalization": "masked_mean", **given}
    stored |= {"group_size": 1, "dynamic_sampling": True}
    for flags in ({}, given):
        partial = resolve(GrpoConfig, flags={"resume": "r", **flags}, command="grpo")
        config = resume(partial, stored, run="r")
        assert (config.cliprange, config.normalize_constant) == (0.1, 7.0)


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


FEW = {"dataset": "arithmetic:32", "eval_dataset": "arithmetic:32"}


@pytest.fixture(scope="module")
def facts():
    """What a plan tells of its inputs."""
    return load_inputs(GrpoConfig(**FEW), questions_per_batch=32).facts


def lines_of(facts, **given):
    """The lines of a plan that say more than what was given."""
    config = GrpoConfig(**given)
    lines = grpo_plan(config, facts, loss=LOSSES[config.loss_type])
    return [f"{name:<14} {value}" for name, value in lines.items()]


def notes_of(**given):
    config = GrpoConfig(**given)
    return grpo_notes(config, loss=LOSSES[config.loss_type])


def test_a_dry_run_says_the_plan_and_its_notes_and_does_nothing(tmp_path, capsys, facts):
    given = {**FEW, "kl_coef": 0.1, "loss_type": "gspo"}
    grpo.run(GrpoConfig(**given, runs_dir=str(tmp_path), dry_run=True))
    said = capsys.readouterr().err
    assert {*lines_of(facts, **given), *(f"note: {note}" for note in notes_of(**given))} <= {*said.splitlines()}
    assert "memory         about" in said
    assert "on-policy" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"eval_every": 10}, "before, after, every 10 updates"),
        ({"eval_every": 10, "final_eval_examples": 8}, "before, every 10 updates; 8 after"),
        ({"eval_every": 0, "final_eval_examples": 2048}, "before; 32 after"),
        ({"eval_every": 0, "final_eval_examples": 4}, "before, after"),
    ],
)  # fmt: skip
def test_the_plan_says_how_many_questions_the_last_evaluation_asks(facts, given, said):
    asked = f"evaluation     4 questions of {facts['eval_dataset']['name']}, "
    assert asked + said in lines_of(facts, eval_examples=4, **given)


def test_what_a_container_may_use_is_the_hosts_memory(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rlvr_cli.training.planning.plan.memory_limit", lambda: 2**10)
    grpo.run(GrpoConfig(**FEW, offload_optimizer=True, runs_dir=str(tmp_path), dry_run=True))
    assert "and this machine has 1 KiB of memory" in capsys.readouterr().err


@pytest.mark.parametrize("normalization", ["masked_mean", "masked_normalize", "token_mean"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_plan_says_the_objective(tmp_path, facts, loss_type, normalization):
    given = {"length_normalization": normalization, "cliprange_high": 0.28, "kl_coef": 0.1, "loss_type": loss_type}
    loss = LOSSES[loss_type]
    if loss_type == "gspo" and normalization != "masked_mean":
        with pytest.raises(RlvrError, match=f"--length-normalization {normalization} does not go with gspo") as refused:
            grpo.run(GrpoConfig(**FEW, **given, runs_dir=str(tmp_path), dry_run=True))
        assert refused.value.hint == "Use --length-normalization masked_mean."
        return
    said = lines_of(facts, **given)
    objective = next(line for line in said if line.startswith("objective"))
    by_hand = {
        "no_baseline": "A_i log p",
        "reinforce_with_baseline": "A_i log p",
        "grpo_clip": "1+0.28",
        "grpo_no_clip": "rho_i,t A_i",
        "gspo": "clip(s_i,t, 1-0.0003, 1+0.28)",
        "cispo": "min(rho_i,t, 5) A_i log p",
        "kimi": "A_i log p_i - (0.1/2) (log p_i - log p_old,i)^2",
    }
    formula = loss.formula(**{name: getattr(GrpoConfig(**given), name) for name in loss.options})
    assert formula.removeprefix("-") in objective
    assert by_hand.get(loss_type, "") in objective
    assert loss.where in objective
    assert ("with no gradient through the min" in objective) == (loss_type == "cispo"), (
        "there is one through that of a KL penalty"
    )
    scales = {"masked_mean": "(1/|o_i|)", "masked_normalize": "(1/(256*1024))", "token_mean": "(1/T)"}
    assert ("(1/256) sum_i [" if loss.per_row else scales[normalization]) in objective
    assert f"0.1 {'mean_t ' if loss.per_row else ''}k3(p_ref, p)" in objective
    assert (
        "KL penalty     k3(p_ref, p) = exp(d) - d - 1, d = log p_ref - log p; its gradient descends KL(p_ref || p)"
        in said
    )
    (masked,) = (line for line in lines_of(facts, **given, overlong="mask") if line.startswith("objective"))
    by_what_is_left = "B the responses of the update that were not cut"
    if loss.per_row or normalization == "masked_mean":
        assert (
            masked
            == f"{objective.replace('(1/256) ', '(1/B) ')}, responses cut at the limit left out, {by_what_is_left}"
        )
    else:
        assert "responses cut at the limit left out" in masked
        assert scales[normalization] in masked
        assert by_what_is_left not in masked


@pytest.mark.parametrize(
    ("given", "precision"),
    [
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
    given = {**FEW, "device": "cpu"} | given
    grpo.run(GrpoConfig(**given, engine="transformers", runs_dir=str(tmp_path), dry_run=True))
    assert f"precision      {precision}\n" in capsys.readouterr().err


def test_on_a_gpu_products_are_in_bfloat16_unless_asked_for():
    assert compute_dtype(GrpoConfig(), "cuda:1") == torch.bfloat16
    assert compute_dtype(GrpoConfig(compute_dtype="float32"), "cuda:1") == torch.float32
    assert compute_dtype(GrpoConfig(), "cpu") == torch.float32


@pytest.mark.parametrize(
    ("given", "noted"),
    [({}, True), ({"optimizer": "adamw_kahan"}, False), ({"optimizer": "adamw_8bit"}, False), ({"offload_optimizer": True}, False)],
)  # fmt: skip
def test_the_plan_notes_steps_that_bfloat16_rounds_away(given, noted):
    said = shared_notes(GrpoConfig(param_dtype="bfloat16", **given), samples=True)
    assert any("rounded away" in note for note in said) is noted


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_plan_notes_what_a_loss_does_about_ratios(loss_type):
    loss = LOSSES[loss_type]
    pointless = f"on-policy, every ratio is 1: {loss_type} has the same gradient as reinforce_with_baseline"
    uncorrected = f"{loss_type} does not correct for off-policy updates; grpo_clip does"
    summed = " with --length-normalization masked_normalize --normalize-constant 1" if loss.per_row else ""
    own = ["kimi is defined for rewards that are only centered; --std-normalization none does not divide them"]
    own *= loss_type == "kimi"
    assert notes_of(loss_type=loss_type) == [pointless + summed] * bool(loss.uses_ratio) + own
    assert notes_of(loss_type=loss_type, epochs_per_rollout_batch=2) == [uncorrected] * (not loss.uses_ratio) + own
    dropped = notes_of(loss_type=loss_type, dynamic_sampling=True)
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
def test_the_plan_says_rewards_advantages_and_divergence_as_formulas(facts, given, line):
    assert line in lines_of(facts, **given)


@pytest.mark.parametrize(
    ("given", "weight"),
    [
        ({"importance_correction": "truncated"}, "min(c, 2) A_i"),
        ({"importance_correction": "truncated", "importance_floor": 0.5}, "min(max(c, 0.5), 2) A_i"),
        ({"importance_correction": "masked", "importance_floor": 0.5, "importance_cap": 5.0}, "c [0.5 <= c <= 5] A_i"),
    ],
)
def test_the_plan_says_the_importance_correction(facts, given, weight):
    objective = next(line for line in lines_of(facts, **given) if line.startswith("objective"))
    assert weight in objective
    assert "c = p_trainer/p_sampler" in objective


def test_the_plan_warns_of_length_rewards_divided_by_their_own_deviation():
    for over, noted in (("group", True), ("batch", False), ("none", False)):
        said = notes_of(length_reward=0.5, std_normalization=over)
        assert any("standard deviation is that of the length rewards alone" in note for note in said) == noted
    for size, note in ((8, None), (1, "with --group-size 1 it has no effect")):  # without a baseline nothing is divided
        said = notes_of(length_reward=0.5, loss_type="no_baseline", group_size=size)
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


def test_a_missing_language_detector_is_named_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RlvrError, match="py3langid is not installed"):
        grpo.run(GrpoConfig(language_reward=0.1, language_detector="py3langid", runs_dir=str(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("dataset", "eval_dataset", "said"),
    [
        ("arithmetic:32", "countdown", "arithmetic:32:0 is graded by r1_zero, and countdown by countdown."),
        ("countdown:32", "arithmetic", "countdown:32:0 is graded by countdown, and arithmetic by r1_zero."),
    ],
)
def test_training_and_evaluation_have_one_grader(tmp_path, dataset, eval_dataset, said):
    own = FEW | {"dataset": dataset, "eval_dataset": eval_dataset, "runs_dir": str(tmp_path)}
    with pytest.raises(RlvrError, match=said):
        grpo.run(GrpoConfig(**own))


def test_a_loss_type_that_is_neither_a_name_nor_a_file(tmp_path):
    with pytest.raises(RlvrError, match="--loss-type is 'ppo'") as raised:
        GrpoConfig(loss_type="ppo")
    assert raised.value.hint == f"Choose one of {', '.join(get_args(LossType))}, FILE.py:FUNCTION."
