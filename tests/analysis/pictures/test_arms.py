"""Arms: which runs belong together, and what distinguishes them."""

import pytest

from rlvr_cli.analysis.pictures.arms import arms_of, split_arms
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir


@pytest.fixture
def labels(tmp_path):
    """Labels of arms, of which each run is given by its name and its options."""

    def call(*arms, command="grpo"):
        infos = []
        for arm in arms:
            for name, config in arm.items():
                with RunDir.create(tmp_path, command, name=name, metadata={"config": config}):
                    pass
            infos.append([read_run(tmp_path / name) for name in arm])
        return [arm.label for arm in arms_of(infos)]

    return call


def test_runs_are_labeled_by_the_options_in_which_they_differ(labels):
    found = labels(
        {"a": {"learning_rate": 3e-05, "group_size": 8, "run": "a"}},
        {"b": {"learning_rate": 0.0001, "group_size": 8, "run": "b"}},
    )
    assert found == ["learning_rate 3e-05", "learning_rate 0.0001"]


def test_the_seed_comes_last_and_where_to_compute_does_not_count(labels):
    found = labels(
        {"a": {"seed": 0, "loss_type": "x", "micro_batch_size": 1, "device": "cpu", "time_limit": "4h"}},
        {"b": {"seed": 1, "loss_type": "y", "micro_batch_size": 2, "device": "cuda", "time_limit": None}},
    )
    assert found == ["loss_type x, seed 0", "loss_type y, seed 1"]


@pytest.mark.parametrize("command", ["sft", "ei"])
def test_epochs_distinguish_arms_although_a_resumed_run_may_have_more(labels, command):
    arms = [{f"e{epochs}": {"sft_epochs": epochs}} for epochs in (1, 3)]
    assert labels(*arms, command=command) == ["sft_epochs 1", "sft_epochs 3"]


def test_an_arm_says_how_many_seeds_it_has(labels):
    arms = [{f"{kind}-s{seed}": {"loss_type": kind, "seed": seed} for seed in range(3)} for kind in ("x", "y")]
    assert labels(*arms) == ["loss_type x (3 seeds)", "loss_type y (3 seeds)"]


def test_runs_of_an_arm_that_differ_in_more_than_the_seed(labels):
    """An option that differs within an arm does not distinguish arms."""
    found = labels({"a0": {"lr": 1}, "a1": {"lr": 2}}, {"b0": {"lr": 3}, "b1": {"lr": 3}})
    assert found == ["a0, a1 (2 runs)", "b0, b1 (2 runs)"]
    assert labels({"long-s0": {"seed": 0}, "long-s1": {"seed": 1}}) == ["long (2 seeds)"]


def test_the_name_where_nothing_or_too_much_differs(labels):
    assert labels({"a": {"lr": 1}}, {"b": {"lr": 1}}) == ["a", "b"]
    assert labels({"c": dict.fromkeys("vwxyz", 1)}, {"d": dict.fromkeys("vwxyz", 2)}) == ["c", "d"]
    assert labels({"alone": {"lr": 1}}) == ["alone"]


def test_options_of_only_some_runs_and_other_commands_do_not_count(labels, tmp_path):
    assert labels({"a": {"lr": 1, "kl_coef": 0.5}}, {"b": {"lr": None}}) == ["lr 1", "lr none"]
    for name, command in (("x", "sft"), ("y", "ei")):
        with RunDir.create(tmp_path, command, name=name, metadata={"config": {"lr": name}}):
            pass
    found = arms_of([[read_run(tmp_path / name)] for name in ("x", "y")])
    assert [(arm.label, arm.command) for arm in found] == [("x", "sft"), ("y", "ei")]


def test_equal_labels_have_their_names(labels):
    found = labels({"a": {"lr": 1}}, {"b": {"lr": 1}}, {"c": {"lr": 2}})
    assert found == ["lr 1 (a)", "lr 1 (b)", "lr 2"]


def test_arms_are_read_from_commas(tmp_path):
    for name in ("a", "b", "c"):
        with RunDir.create(tmp_path, "eval", name=name, metadata={}):
            pass
    assert split_arms(["a,b", "c"], str(tmp_path))[0] == [[tmp_path / "a", tmp_path / "b"], [tmp_path / "c"]]
    with pytest.raises(RlvrError, match="no run 'd'"):
        split_arms(["a,d"], str(tmp_path))


def test_a_pattern_with_a_comma_is_one_arm_and_its_runs_stand_by_their_numbers(tmp_path):
    names = ("n-128", "n-1024", "n-all", "lr-3e-5", "lr-1e-4", "lr-0.01")
    for name in names:
        with RunDir.create(tmp_path, "eval", name=name, metadata={}):
            pass
    sizes, rates = ([tmp_path / name for name in part] for part in (names[:3], names[3:]))
    assert split_arms(["lr-*"], str(tmp_path))[0] == [[path] for path in rates]
    assert split_arms(["n-*,", "lr-*,"], str(tmp_path))[0] == [sizes, rates]


def test_a_directory_with_a_comma_is_one_run(tmp_path):
    with RunDir.create(tmp_path / "x,y", "eval", name="a", metadata={}):
        pass
    path = tmp_path / "x,y" / "a"
    assert split_arms([str(path)], str(tmp_path))[0] == [[path]]
