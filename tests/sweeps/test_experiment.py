"""Experiments: their arms, names and runs, and what is refused."""

from pathlib import Path

import pytest

from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.parsing.command_line import values_of
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.errors import RlvrError, UsageError
from rlvr_cli.sweeps.continued import lengths_of
from rlvr_cli.sweeps.experiment import (
    check_runs,
    command_of,
    configs_of,
    experiment_names,
    experiment_text,
    load_experiment,
    next_stage,
    runs_of,
)

OWN = """
title = "Mine"
command = "grpo"
seeds = [3, 4]
baseline = "big"

[options]
preset = "quickstart"
n-grpo-steps = 2

[[arms]]
name = "small"
group_size = 4

[[arms]]
name = "big"
group_size = 16

[paired]
learning_rate = [1e-5, 1e-4]
warmup_steps = [0, 5]

[grid]
loss_type = ["gspo", "cispo"]
"""


@pytest.fixture
def write(tmp_path):
    def call(text):
        (tmp_path / "mine.toml").write_text(text)
        return str(tmp_path / "mine.toml")

    return call


def test_arms_are_lists_pairs_and_a_grid_together(write):
    found = load_experiment(write(OWN.replace('baseline = "big"\n', "")))
    assert (found.name, found.title, found.command, found.seeds) == ("mine", "Mine", "grpo", [3, 4])
    assert found.options == {"preset": "quickstart", "n_grpo_steps": 2}
    assert found.varied == ["group_size", "learning_rate", "warmup_steps", "loss_type"]
    assert len(found.arms) == 2 * 2 * 2
    assert found.arms[0] == {"group_size": 4, "learning_rate": 1e-5, "warmup_steps": 0, "loss_type": "gspo"}
    assert found.arms[-1] == {"group_size": 16, "learning_rate": 1e-4, "warmup_steps": 5, "loss_type": "cispo"}
    assert found.names[0] == found.baseline == "small_learning_rate-1e-05_warmup_steps-0_gspo"
    assert len(set(found.names)) == 8


def test_runs_begin_with_all_arms_of_the_first_seed(write):
    grid = '{}command = "grpo"\nseeds = [1, 0]\n[grid]\ngroup_size = [2, 4]\n'
    names = [run.name for run in runs_of(load_experiment(write(grid.format(""))))]
    assert names == ["group_size-2-s1", "group_size-4-s1", "group_size-2-s0", "group_size-4-s0"]
    names = [run.name for run in runs_of(load_experiment(write(grid.format('order = "arms"\n'))))]
    assert names == ["group_size-2-s1", "group_size-2-s0", "group_size-4-s1", "group_size-4-s0"]


def test_the_command_line_changes_the_options_the_values_and_the_seeds(tmp_path):
    found = load_experiment(
        "grpo_baselines",
        overrides=["--preset", "quickstart", "--model", "m", "--stop", "a", "--stop", "b"],
        vary=["loss-type=gspo,mine.py:loss", "--kl-coef=0,0.1"],
        seeds=[7],
    )
    assert found.options == {"preset": "quickstart", "model": "m", "stop": ("a", "b")}
    assert found.names == ["gspo_kl_coef-0", "gspo_kl_coef-0.1", "mine.py-loss_kl_coef-0", "mine.py-loss_kl_coef-0.1"]
    assert found.baseline == "gspo_kl_coef-0"
    runs = runs_of(found)
    words = command_of(found, runs[1], runs_dir=tmp_path)
    assert words[:2] == ["rlvr", "grpo"]
    assert values_of(GrpoConfig, words[2:], command="grpo") == {
        "preset": "quickstart", "model": "m", "stop": ("a", "b"), "loss_type": "gspo", "kl_coef": 0.1, "seed": 7,
        "run": "gspo_kl_coef-0.1-s7", "runs_dir": str(tmp_path),
    }  # fmt: skip


def test_what_a_config_file_of_the_command_line_sets_comes_before_the_experiments_own(write, tmp_path, capsys):
    file = tmp_path / "own.toml"
    file.write_text("seed = 5\nn-grpo-steps = 10\neval_every = 4\n[grpo]\ngroup-size = 16\n")
    found = load_experiment(write(STAGED), overrides=["--config", str(file)])
    assert [config.n_grpo_steps for config in check_runs(found, runs_of(found))] == [10] * 8
    assert "note: --group-size of " in (said := capsys.readouterr().err)
    assert "/own.toml has no effect in arms that have their own\n" in said
    assert said.startswith("note: --seed of ")
    assert said.count("/own.toml has no effect, since a sweep sets it: it has --seeds\n") == 1
    long = next_stage(found, {"group_size-2": 0.5})
    assert [(c.n_grpo_steps, c.eval_every) for c in configs_of(long, runs_of(long))] == [(50, 4)]
    assert [config.format_weight for config in configs_of(long, runs_of(long))] == [0.5]
    found = load_experiment(write(STAGED), overrides=["--config", str(file), "--n-grpo-steps", "3"])
    assert check_runs(found, runs_of(found))[0].n_grpo_steps == 3


def test_a_run_named_as_dataset_is_one_beside_the_sweep(tmp_path):
    for name in ("samples", "a/lr-s0"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text("{}")
    beside = {name: str(tmp_path / name) for name in ("samples", "a/lr-s0")}
    elsewhere = ("gsm8k", "x/samples", "a", "../" + tmp_path.name + "/samples")
    for named, expected in [*beside.items(), *zip(elsewhere, elsewhere, strict=True)]:
        found = load_experiment("sft_filtered", overrides=["--dataset", named])
        words = command_of(found, runs_of(found)[0], runs_dir=tmp_path / "sft_filtered")
        assert values_of(SftConfig, words[2:], command="sft")["dataset"] == expected


def test_one_value_of_what_varies_is_one_arm():
    found = load_experiment("grpo_off_policy_sweep", vary=["epochs_per_rollout_batch=2", "train_batch_size=64,32"])
    assert found.names == [
        "epochs_per_rollout_batch-2_train_batch_size-64",
        "epochs_per_rollout_batch-2_train_batch_size-32",
    ]


def test_truth_varies_too():
    found = load_experiment("sft_dataset_size", vary=["correct_only=true,false", "num_examples=all"])
    assert found.names == ["num_examples-all_correct_only-true", "num_examples-all_correct_only-false"]
    assert [arm["correct_only"] for arm in found.arms] == [True, False]


def test_large_and_small_values_have_names_that_tell_them_apart():
    found = load_experiment("grpo_baselines", vary=["max_grad_norm=1e-6,1,1000000", "loss_type=gspo"])
    assert found.names == [f"gspo_max_grad_norm-{value}" for value in ("1e-06", "1", "1e06")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("command = ", "is not valid TOML"),
        ('command = "grade"', "the command is 'grade'"),
        ("", "the command is ''"),
        ('command = "discover"', "An experiment runs one of eval, sft, dpo, ei, grpo, ppo, distill"),  # it has no accuracy
        ('command = "grpo"\n[grid]\n' + "\n".join(
            f"{name} = {[*range(1, 40)]}" for name in ("group_size", "rollout_batch_size", "train_batch_size", "eval_every", "learning_rate")
        ), "These are 90,224,199 runs"),
        ('command = "grpo"\nseed = 1', "'seed' is no key of an experiment"),
        ('command = "grpo"\nseeds = []', "seeds is not a list of whole numbers"),
        ('command = "grpo"\nseeds = [true]', "seeds is not a list of whole numbers"),
        ('command = "grpo"\norder = "random"', "the order is 'random'"),
        ('command = "grpo"\ntitle = 3', "title is not a text"),
        ('command = "grpo"\ngrid = 3', "grid is not a table"),
        ('command = "grpo"\narms = [1]', "arms is not a list of tables"),
        ('command = "grpo"\n[options]\ngroup = 3', "'group' is not an option of rlvr grpo"),
        ('command = "grpo"\n[options]\ngroup_size = "a"', "group_size is 'a'; expected int" ),
        ('command = "grpo"\n[options]\ngroup_size = 2\ngroup-size = 4', "group_size is given twice"),
        ('command = "grpo"\n[[arms]]\ngroup_size = 2\ngroup-size = 4', "group_size is given twice"),
        ('command = "grpo"\n[options]\nseed = 3', "A sweep sets --seed itself"),
        ('command = "grpo"\n[grid]\nrun = ["a", "b"]', "A sweep sets --run itself"),
        ('command = "grpo"\n[grid]\ngroup_size = 4', "group_size in \\[grid\\] is not a list"),
        ('command = "grpo"\n[grid]\ngroup_size = [4, 4]', "two arms have the same options"),
        ('command = "grpo"\n[paired]\ngroup_size = [4, 8]\nepochs_per_rollout_batch = [1]', "not equally long: group_size 2"),
        ('command = "grpo"\n[grid]\ngroup_size = [4]\n[paired]\ngroup_size = [8]', "group_size varies in two places"),
        ('command = "grpo"\nbaseline = "x"\n[grid]\ngroup_size = [4, 8]', "the baseline 'x' is no arm"),
        ('command = "grpo"\n[[arms]]\nname = "a"\nseed = 1\n[[arms]]\nname = "a"\ngroup_size = 4', "two arms are named a"),
        ('command = "grpo"\n[[arms]]\nname = 3', "the name of an arm is not a text"),
        ('command = "grpo"\n[[arms]]\nname = "日本"', "the arm's name '日本' has no character"),
        ('command = "grpo"\nstages = 3', "stages is not a list of tables"),
        ('command = "grpo"\n[[stages]]\nbest = 3', "the name of a stage is None"),
        ('command = "grpo"\n[[stages]]\nname = "a/b"\nbest = 3', "the name of a stage is 'a/b'"),
        ('command = "grpo"\n[[stages]]\nname = "a"', "best of the stage a is no whole number above 0"),
        ('command = "grpo"\n[[stages]]\nname = "a"\nbest = 1\nlonger = 1.5', "longer of the stage a is no whole number"),
        ('command = "grpo"\n[[stages]]\nname = "a"\nbest = 1\nseeds = [-1]', "seeds of the stage a is not a list of whole"),
        ('command = "grpo"\n[[stages]]\nname = "a"\nbest = 1\nstep = 1', "'step' is no key of a stage"),
        ('command = "grpo"\n[[stages]]\nname = "a"\nbest = 1\noptions = 3', "options of the stage a is not a table"),
        ('command = "grpo"\n[[stages]]\nname = "a"\nbest = 1\noptions = { x = 3 }', "'x' is not an option of rlvr grpo"),
        ('command = "grpo"\n[[stages]]\nname = "a"\nbest = 1\n[[stages]]\nname = "a"\nbest = 1', "two stages have the same name"),
    ],
)  # fmt: skip
def test_files_that_are_refused(text, problem, write):
    with pytest.raises(RlvrError, match=problem):
        load_experiment(write(text))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"overrides": ["--loss-type", "gspo"]}, "--loss-type varies in grpo_baselines"),
        ({"overrides": ["--run", "x"]}, "A sweep sets --run itself"),
        ({"overrides": ["--resume", "x"]}, "A sweep sets --resume itself"),
        ({"vary": ["loss_type"]}, "--vary loss_type has no values"),
        ({"vary": ["los_type=gspo"]}, "rlvr grpo has no option --los-type"),
        ({"vary": ["group_size=a"]}, "--group-size is 'a'"),
        ({"vary": ["dynamic_sampling=yes"]}, "'yes' is neither true nor false"),
        ({"vary": ["seed=0,1"]}, "A sweep sets --seed itself"),
        ({"vary": ["group_size=4", "--group-size=8"]}, "--vary has --group-size twice"),
    ],
)
def test_changes_that_are_refused(flags, problem):
    with pytest.raises(RlvrError, match=problem):
        load_experiment("grpo_baselines", **flags)


@pytest.mark.parametrize("arms", ["[grid]\ngroup_size = [4, 8]", "[[arms]]\ngroup-size = 4\n[[arms]]"])
def test_what_a_stage_sets_cannot_vary(write, arms):
    text = f'command = "grpo"\n{arms}\n[[stages]]\nname = "long"\nbest = 1\noptions = {{ group_size = 16 }}'
    problem = r"mine\.toml: group_size varies in two places: arms set it, and so does the stage long"
    with pytest.raises(RlvrError, match=problem):
        load_experiment(write(text))


def test_what_a_stage_sets_can_vary_on_the_command_line(write):
    found = load_experiment(write(STAGED), vary=["eval_every=2,4"])
    assert "eval_every" in found.varied
    assert found.stages[0].options == {"format_weight": 0.5}


STAGED = """
command = "grpo"
seeds = [0, 1]
baseline = "group_size-2"
[options]
n_grpo_steps = 40
eval_every = 10
[grid]
group_size = [2, 4, 8, 16]
[[stages]]
name = "long"
best = 2
longer = 5
seeds = [7]
options = { eval_every = 20, format_weight = 0.5 }
[[stages]]
name = "longest"
best = 1
"""


def test_the_best_arms_go_on_to_the_next_stage_beside_the_baseline(write):
    found = load_experiment(write(STAGED), overrides=["--eval-every", "5"])
    long = next_stage(found, {"group_size-2": 0.1, "group_size-4": 0.5, "group_size-8": 0.3, "group_size-16": 0.5})
    assert (long.name, long.names) == ("mine-long", ["group_size-2", "group_size-4", "group_size-16"])
    assert long.arms == [{"group_size": 2}, {"group_size": 4}, {"group_size": 16}]
    assert long.options == {"n_grpo_steps": 200, "eval_every": 5, "format_weight": 0.5}  # the command line comes first
    assert long.seeds == [7]
    last = next_stage(long, {"group_size-2": 0.6, "group_size-16": 0.2})  # the others diverged, say
    assert (last.name, last.names, last.seeds, last.stages) == ("mine-long-longest", ["group_size-2"], [7], [])
    assert last.options == long.options


def test_of_equal_arms_the_first_goes_on_and_a_length_that_is_a_default_grows_too(write):
    text = STAGED.replace("n_grpo_steps = 40\n", "").replace("best = 2", "best = 1")
    long = next_stage(load_experiment(write(text)), {"group_size-4": 0.5, "group_size-8": 0.5})
    assert long.names == ["group_size-2", "group_size-4"]
    assert long.options["n_grpo_steps"] == 1000


def test_arms_with_a_number_of_steps_of_their_own_grow_from_it(write):
    text = (
        'command = "grpo"\n[options]\nn_grpo_steps = 7\n[[arms]]\nname = "a"\nn_grpo_steps = 10\n[[arms]]\nname = "b"\n'
    )
    text += '[[arms]]\nname = "c"\nn_grpo_steps = 20\n[[stages]]\nname = "long"\nbest = 3\nlonger = 5'
    long = next_stage(load_experiment(write(text)), {"a": 0.1, "b": 0.5, "c": 0.3})
    assert [config.n_grpo_steps for config in check_runs(long, runs_of(long))] == [50, 35, 100]
    assert long.arms[1] == {}


def test_runs_without_a_number_of_steps_cannot_be_made_longer(write):
    text = 'command = "sft"\n[grid]\nnum_examples = ["4", "8"]\n[[stages]]\nname = "long"\nbest = 1\nlonger = 2'
    with pytest.raises(RlvrError, match="the runs have no --n-sft-steps"):
        next_stage(load_experiment(write(text)), {"num_examples-4": 0.5})


ARMS = """
command = "grpo"
baseline = "short"
[[arms]]
name = "short"
sampling-max-tokens = 64
group_size = 8
[[arms]]
name = "long"
sampling-max-tokens = 512
group_size = 4
"""


def test_what_arms_set_is_replaced_by_the_command_line_and_said(write, capsys):
    path = write(ARMS)
    found = load_experiment(path, overrides=["--group-size", "2"])
    assert (found.names, found.options["group_size"]) == (["short", "long"], 2)
    assert found.arms == [{"sampling_max_tokens": 64}, {"sampling_max_tokens": 512}]
    assert "--group-size of the command line replaces what the arms of" in capsys.readouterr().err
    found = load_experiment(path, vary=["group_size=2,16"])
    assert found.names == ["short_group_size-2", "short_group_size-16", "long_group_size-2", "long_group_size-16"]
    assert [arm["group_size"] for arm in found.arms] == [2, 16, 2, 16]
    load_experiment(path)
    assert "replaces" not in capsys.readouterr().err.partition("16")[2]


@pytest.mark.parametrize(
    ("baseline", "vary", "expected", "note"),
    [
        ("long", "learning_rate=3e-5", "long_learning_rate-3e-05", True),
        ("long", "group_size=2,16", "long_group_size-2", True),
        ("short", "group_size=2,16", "short_group_size-2", True),
        ("gone", "group_size=2,16", "short_group_size-2", True),
        ("long", "", "long", False),
        ("", "group_size=2,16", "short_group_size-2", False),
    ],
)
def test_the_baseline_stays_where_its_name_grows_and_is_told(write, capsys, baseline, vary, expected, note):
    path = write(ARMS.replace('baseline = "short"\n', f'baseline = "{baseline}"\n' if baseline else ""))
    assert load_experiment(path, vary=[vary] if vary else []).baseline == expected
    said = f"note: the baseline is {expected}: with --vary no arm of {path} is named {baseline}\n"
    assert (said in capsys.readouterr().err) is note


def test_an_arm_whose_name_begins_with_the_baselines_is_another(write):
    path = write(ARMS.replace('name = "short"', 'name = "long_too"').replace('baseline = "short"', 'baseline = "long"'))
    assert load_experiment(path, vary=["learning_rate=3e-5"]).baseline == "long_learning_rate-3e-05"


def test_arms_that_nothing_else_tells_apart_keep_what_they_set():
    for given in ({"vary": ["group_size=2,4"]}, {"overrides": ["--group-size", "4"]}):
        with pytest.raises(
            RlvrError, match="Without their own --group-size, two arms of ei_rollouts have the same options"
        ) as raised:
            load_experiment("ei_rollouts", **given)
        assert "rlvr sweep ei_rollouts --show > mine.toml" in raised.value.hint


def test_a_sweep_of_sft_can_be_made_longer(write):
    experiment = load_experiment(write('command = "sft"\n[options]\nsft_epochs = 3\n[grid]\nnum_examples = ["4", "8"]'))
    lengths = [lengths_of(config) for config in check_runs(experiment, runs_of(experiment))]
    assert lengths == [{"sft_epochs": 3, "n_sft_steps": 0}] * 2
    experiment = load_experiment("sft_dataset_size")
    assert {**lengths_of(check_runs(experiment, runs_of(experiment))[0])} == {"n_sft_steps": 500}, (
        "epochs are no length"
    )


LOSSES = """
command = "grpo"
[options]
n_grpo_steps = 4
cispo_cap = 3.0
[grid]
loss_type = ["grpo_clip", "cispo"]
[[stages]]
name = "long"
best = 1
longer = 2
"""


def test_arms_do_without_what_has_no_effect_in_them(write, tmp_path, capsys):
    found = load_experiment(write(LOSSES), overrides=["--kl-coef", "0.1", "--kl-type", "k2"])
    assert capsys.readouterr().err == "note: --cispo-cap has no effect in 1 of the 2 arms, which do without it\n"
    assert found.options["cispo_cap"] == 3
    check_runs(found, runs_of(found))
    runs = runs_of(found)
    assert [run.options.get("cispo_cap") for run in runs] == [None, 3]
    assert ["--cispo-cap" in command_of(found, run, runs_dir=tmp_path) for run in runs] == [False, True]
    assert [config.cispo_cap for config in configs_of(found, runs)] == [5, 3]
    long = next_stage(found, {"grpo_clip": 0.5})  # no arm of this stage has a use of it
    check_runs(long, runs_of(long))
    assert runs_of(long)[0].options == {
        "n_grpo_steps": 8, "kl_coef": 0.1, "kl_type": "k2", "loss_type": "grpo_clip", "seed": 0,
    }  # fmt: skip


def test_a_clip_range_of_all_runs_is_that_of_the_arms_whose_loss_clips():
    found = load_experiment("objectives", overrides=["--model", "m", "--cliprange", "0.1"], seeds=[0])
    with_range = [run.arm for run in runs_of(found) if "cliprange" in run.options]
    assert with_range == ["grpo_clip", "gspo"]
    check_runs(found, runs_of(found))
    found = load_experiment("grpo_length_normalization", overrides=["--normalize-constant", "512"], seeds=[0])
    assert [run.options.get("normalize_constant") for run in runs_of(found)] == [None, 512]


def test_what_has_no_effect_in_any_arm_or_is_an_arms_own_is_refused(write):
    with pytest.raises(RlvrError, match="mine: --kimi-tau has no effect without --loss-type kimi"):
        load_experiment(write(LOSSES), overrides=["--kimi-tau", "0.2"])
    with pytest.raises(RlvrError, match="mine: --kimi-tau has no effect without --loss-type kimi"):
        load_experiment(write(LOSSES + "options = { kimi_tau = 0.2 }"))
    found = load_experiment(write(LOSSES), vary=["cispo_cap=2,3"])
    with pytest.raises(RlvrError, match="grpo_clip_cispo_cap-2-s0: --cispo-cap has no effect without --loss-type"):
        check_runs(found, runs_of(found))


def test_an_unknown_experiment_is_named():
    with pytest.raises(RlvrError, match="Did you mean grpo_baselines"):
        load_experiment("grpo_baseline")


def test_a_run_that_the_command_refuses_is_found_before_any_starts():
    found = load_experiment("grpo_baselines", overrides=["--model", "m"], vary=["group_size=8,7"])
    with pytest.raises(RlvrError, match="no_baseline_group_size-7-s0: --rollout-batch-size 256 is not a multiple"):
        check_runs(found, runs_of(found))


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ('dataset = "arithmetic:8,countdown:8"', "s0: --dataset arithmetic:8,countdown:8 names several, and makes a run for each"),
        ('thinking_budget = "16,32"', "s0: --thinking-budget 16,32 names several, and makes a run for each"),
        ("check_dataset = true", "s0: --check-dataset makes no run"),
        ("dry_run = true", "s0: --dry-run makes no run"),
    ],
)  # fmt: skip
def test_options_that_make_several_runs_or_none_are_refused(write, option, problem):
    found = load_experiment(write(f'command = "eval"\n[options]\n{option}\n[grid]\nnum_samples = [1, 2]'))
    with pytest.raises(UsageError, match=problem):
        check_runs(found, runs_of(found))


@pytest.mark.parametrize(
    ("before", "now", "problem"),
    [
        ("format_weight = 0.5", "eval_every = -1", "--eval-every is -1"),
        (
            "best = 1",
            "best = 1\noptions = { rollout_batch_size = 8 }",
            "mine-long-longest/group_size-2-s7: --rollout-batch-size 8",
        ),
    ],
)
def test_a_stage_that_the_command_refuses_is_found_before_any_run_starts(write, before, now, problem):
    found = load_experiment(
        write(STAGED.replace("eval_every = 20, format_weight = 0.5", "format_weight = 0.5").replace(before, now))
    )
    with pytest.raises(RlvrError, match=problem):
        check_runs(found, runs_of(found))


def test_a_file_that_is_no_text_is_named(write, tmp_path):
    path = Path(write(""))
    path.write_bytes('title = "é"'.encode("latin-1"))
    for read in (load_experiment, experiment_text):
        with pytest.raises(RlvrError, match=r"mine\.toml is not valid TOML: 'utf-8' codec"):
            read(str(path))
        with pytest.raises(RlvrError, match=r"Cannot read the experiment none\.toml"):
            read("none.toml")


def test_a_file_may_begin_with_a_byte_order_mark(write):
    assert load_experiment(write("\ufeffcommand = 'grpo'")).command == "grpo"


@pytest.mark.parametrize("name", ["sft_dataset_size", "sft_filtered"])
def test_arms_of_other_sizes_make_as_many_updates_and_have_curves(name):
    found = load_experiment(name, overrides=["--model", "m"])
    configs = [*configs_of(found, runs_of(found))]
    assert len({(c.n_sft_steps, c.train_batch_size, c.eval_every) for c in configs}) == 1
    assert configs[0].n_sft_steps / configs[0].eval_every >= 10


@pytest.mark.parametrize("name", experiment_names())
def test_a_built_in_experiment_is_accepted_by_its_command(name):
    found = load_experiment(name, overrides=["--model", "m", "--dataset", "arithmetic:4000"])
    check_runs(found, runs_of(found))
    assert found.title.endswith("?")
    assert found.look_at
    assert found.baseline in found.names
    assert len(found.seeds) >= 3 or len(found.arms) != 2 or found.command == "sft"
