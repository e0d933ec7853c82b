"""Each alarm sounds on a curve made for it, and none on a run in which nothing is wrong."""

import pytest

from factories import a_grade, a_rollout
from rlvr_cli.analysis.queries.database import Database, open_runs
from rlvr_cli.analysis.report.build import alarms_of
from rlvr_cli.analysis.run_end import print_findings
from rlvr_cli.analysis.statistics import alarms
from rlvr_cli.analysis.statistics.alarms import find_alarms, run_alarms
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Regrade

WELL = {
    "reward/mean": (0.3, 0.8),
    "reward/format": (0.9, 0.95),
    "reward/answer": (0.3, 0.8),
    "reward/samples": (256, 256),
    "reward/grade_errors": (0, 0),
    "policy/entropy": (0.3, 0.1),
    "length/truncated_share": (0.02, 0.03),
    "length/correct": (100, 150),
    "length/wrong": (110, 180),
    "groups/signal_share": (0.9, 0.5),
    "mismatch/logprob_mean_abs": (0.004, 0.006),
    "optimizer/grad_norm": (0.5, 0.3),
    "update/skipped": (0, 0),
}


def curves(**ends):
    """A run of 21 steps in which each metric goes evenly from one value to the other."""
    named = WELL | {name.replace("__", "/"): value for name, value in ends.items()}
    return {name: {step: a + (b - a) * step / 20 for step in range(21)} for name, (a, b) in named.items()}


def names(found):
    return [alarm.name for alarm in found]


def test_nothing_sounds_when_nothing_is_wrong():
    assert names(find_alarms(curves())) == []
    assert names(find_alarms({})) == []


@pytest.mark.parametrize(
    ("name", "ends", "shown"),
    [
        ("entropy_collapse", {"policy__entropy": (0.4, 0.001)}, "0.03"),
        ("truncation_creep", {"length__truncated_share": (0.0, 0.4)}, "37%"),
        ("wrong_answers_grow", {"length__wrong": (100, 400)}, "from 122 to 378 tokens"),
        ("no_signal", {"groups__signal_share": (0.9, 0.0), "reward__mean": (0.3, 0.85)}, "easy"),
        ("no_signal", {"groups__signal_share": (0.9, 0.0), "reward__mean": (0.0, 0.01)}, "hard"),
        ("format_without_answers", {"reward__format": (0.2, 0.9), "reward__answer": (0.1, 0.1)}, "0.85"),
        ("format_without_answers", {"reward__format": (0.2, 0.9), "reward__answer": (0.1, 0.3)}, "from 0.12 to 0.29"),
        ("mismatch_grows", {"mismatch__logprob_mean_abs": (0.001, 0.05)}, "0.046"),
        ("grade_errors", {"reward__grade_errors": (1, 1)}, "21 of 5376 training responses could not be graded and"),
        ("grade_errors", {"reward__grade_errors": (1, 1), "episodes__turns": (2, 2)}, ", or their environment failed, and"),
    ],
)  # fmt: skip
def test_each_alarm_sounds_on_its_curve(name, ends, shown):
    (alarm,) = find_alarms(curves(**ends))
    assert alarm.name == name
    assert shown in alarm.sentence
    assert alarm.query.startswith("rlvr analyze ")
    assert "RUN" in alarm.query


def test_a_normalization_is_advised_only_to_a_run_that_has_the_other():
    grown = curves(length__wrong=(100, 400))
    for config, advised in (
        ({"length_normalization": "masked_mean"}, True),
        ({"length_normalization": "masked_normalize"}, False),
        ({}, False),  # as of rlvr ppo
    ):
        (alarm,) = find_alarms(grown, config=config)
        assert ("--length-normalization" in alarm.sentence) == advised


def test_a_short_run_without_any_signal_is_told():
    short = {"groups/signal_share": {0: 0.0, 1: 0.0}, "reward/mean": {0: 0.0, 1: 0.0}}
    (alarm,) = find_alarms(short)
    assert (alarm.name, alarm.severity) == ("no_signal", "warning")
    assert "in none of the 2 batches" in alarm.sentence
    assert "mean reward is 0.00" in alarm.sentence
    assert names(find_alarms(short | {"groups/signal_share": {0: 0.0, 1: 0.1}})) == []
    assert names(find_alarms(short | {"reward/mean": {0: 1.0, 1: 1.0}})) == []


def test_a_sampler_that_lags_behind_is_meant_to_differ():
    assert names(find_alarms(curves(mismatch__logprob_mean_abs=(0.001, 0.05), sampling__lag=(1, 1)))) == []


def test_entropy_may_fall_when_the_task_is_solved():
    assert names(find_alarms(curves(policy__entropy=(0.4, 0.001), reward__mean=(0.3, 1.0)))) == []


def test_a_spike_is_told_by_its_steps_and_nan_is_none():
    spiked = curves()
    spiked["optimizer/grad_norm"] |= {7: 9.0, 13: float("nan")}
    (alarm,) = find_alarms(spiked)
    assert alarm.name == "gradient_spikes"
    assert alarm.sentence.endswith(" after 7 updates")


@pytest.mark.parametrize("name", sorted({*WELL, "sampling/lag"}))
def test_infinite_metrics_are_passed_over(name):
    infinite = float("inf")
    once = curves()
    once[name] = {**once.get(name, {}), 17: infinite}
    always = curves() | {name: dict.fromkeys(range(21), infinite)}
    loud = {"grade_errors"} if name == "reward/grade_errors" else set()
    loud |= {"skipped_updates"} if name == "update/skipped" else set()
    spiked = {"gradient_spikes"} if name == "optimizer/grad_norm" else set()
    assert set(names(find_alarms(once))) == loud | spiked
    assert set(names(find_alarms(always))) == loud


def test_steep_first_steps_and_those_of_a_solved_task_are_no_spikes():
    steep = curves()
    steep["optimizer/grad_norm"] |= dict.fromkeys(range(5), 9.0)
    assert names(find_alarms(steep)) == []
    late = curves(reward__mean=(0.6, 1.0))
    late["optimizer/grad_norm"] |= {20: 9.0}
    assert names(find_alarms(late)) == []
    late["optimizer/grad_norm"] |= {8: 9.0}  # when the mean reward is 0.7
    assert [a.sentence[-15:] for a in find_alarms(late)] == ["after 8 updates"]
    assert names(find_alarms(late | {"reward/mean": curves()["reward/mean"]})) == ["gradient_spikes"]


@pytest.mark.parametrize(
    ("steps", "said"), [([1], "1 update"), ([3, 4], "3, 4 updates"), (range(7), "0, 1, 2, 3, 4 and 2 more updates")]
)
def test_skipped_updates_are_errors(steps, said):
    skipped = curves()
    skipped["update/skipped"] |= dict.fromkeys(steps, 1.0)
    (alarm,) = find_alarms(skipped)
    assert (alarm.name, alarm.severity) == ("skipped_updates", "error")
    assert f"no update was made after {said}: a loss" in alarm.sentence


def test_an_update_without_a_token_is_no_error():
    skipped = curves()
    skipped["update/skipped"] |= {3: 1.0, 4: 1.0}
    skipped["update/tokens"] = dict.fromkeys(range(21), 100.0) | {4: 0.0}
    error, warning = find_alarms(skipped)
    assert (error.severity, warning.severity) == ("error", "warning")
    assert "after 3 updates: a loss" in error.sentence
    assert "after 4 updates: nothing to train on" in warning.sentence
    (alarm,) = find_alarms(skipped | {"reward/mean": curves(reward__mean=(0.3, 1.0))["reward/mean"]})
    assert alarm == error


def test_a_second_grader_that_disagrees_more_and_more():
    growing = {"math_verify": {step: 0.01 * step for step in range(21)}, "gsm8k": dict.fromkeys(range(21), 0.3)}
    (alarm,) = find_alarms(curves(), disagreement=growing)
    assert alarm.name == "graders_part"
    assert alarm.sentence.startswith("math_verify")


def test_a_run_of_few_steps_has_no_trend():
    short = {
        name: {step: curve[step * 6] for step in range(4)} for name, curve in curves(policy__entropy=(0.4, 0)).items()
    }
    assert names(find_alarms(short)) == []


def test_a_query_is_typed_for_the_runs_own_place(tmp_path):
    (alarm,) = find_alarms(curves(policy__entropy=(0.4, 0.001)))
    assert alarm.command_for(tmp_path / "a run") == f"rlvr analyze entropy '{tmp_path / 'a run'}' --phase train"


def test_alarms_come_in_the_order_of_the_table():
    bad = curves(
        policy__entropy=(0.4, 0.001), length__truncated_share=(0.0, 0.4), length__wrong=(100, 400), groups__signal_share=(0.9, 0.0),
        reward__mean=(0.1, 0.2), reward__format=(0.2, 0.9), reward__answer=(0.1, 0.1), reward__grade_errors=(1, 1),
        mismatch__logprob_mean_abs=(0.001, 0.05),
    )  # fmt: skip
    bad["optimizer/grad_norm"] |= {7: 9.0}
    bad["update/skipped"] |= {3: 1.0}
    apart = {step: 0.01 * step for step in range(21)}
    assert names(find_alarms(bad, disagreement={"math_verify": apart, "gsm8k": apart})) == [
        "entropy_collapse", "truncation_creep", "wrong_answers_grow", "no_signal", "format_without_answers", "graders_part",
        "graders_part", "mismatch_grows", "gradient_spikes", "skipped_updates", "grade_errors",
    ]  # fmt: skip


@pytest.mark.parametrize("judge_fails", [False, True])
def test_a_judge_that_parts_from_a_rule_is_told_and_one_that_fails_is_no_disagreement(tmp_path, judge_fails, capsys):
    """Of 10 responses a step, the judge rewards more and more that the rule does not, or fails on them; in the last step all 10."""
    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        for step in range(11):
            liked = None if judge_fails else 1.0
            rows = [
                a_rollout(
                    run_id="r", phase="train", step=step, policy_version=step, example_id=str(i), advantage=0.0, grader="judge:r.md",
                    reward=liked if i < step else 0.0, format_reward=None, answer_reward=None, category="reward_only",
                )
                for i in range(10)
            ]  # fmt: skip
            run.commit_rollouts("train", step, rows)
            truth = float(judge_fails)  # where the judge fails, the rule finds a right answer
            of_rule = [
                Regrade(
                    "r", "train", step, str(i), 0, "math_verify", 0, None, None, None, truth if i < step else 0.0, None, None,
                    "reward_only", None,
                )
                for i in range(10)
            ]  # fmt: skip
            run.commit_grades("train", step, of_rule)
    info = read_run(run.path)
    with open_runs([info]) as database:
        found = [alarm for alarm in run_alarms(database, info) if alarm.name == "graders_part"]
    assert len(found) == (0 if judge_fails else 1)
    assert all("math_verify disagrees with 95%" in alarm.sentence for alarm in found)
    print_findings(info.path, step=None, output="table")
    assert ("math_verify disagrees with 95%" in capsys.readouterr().err) == bool(found), "also when the run has ended"


def test_the_alarms_of_a_run_are_its_own(tmp_path, monkeypatch):
    """Two runs in a database, of which one has no reward and a judge that parts from its rule."""
    infos = []
    for name, parts in (("ill", True), ("well", False)):
        with RunDir.create(tmp_path, "grpo", name=name, metadata={}) as run:
            for step in range(10):
                reward = float(parts and step > 4)
                graded = {"phase": "train", "step": step, "example_id": "q", "sample_index": 0}
                run.commit_rollouts(
                    "train", step, [a_rollout(run_id=name, policy_version=step, reward=reward, **graded)]
                )
                run.commit_grades("train", step, [a_grade(run_id=name, grader="math_verify", reward=0.0, **graded)])
                run.commit_metrics(step, "train", {"reward/grade_errors": float(parts), "reward/samples": 4.0})
        infos.append(read_run(tmp_path / name))
    with open_runs(infos) as database:
        assert [names(run_alarms(database, info)) for info in infos] == [["graders_part", "grade_errors"], []]
        asked = []

        def counted(*arguments):
            asked.append(arguments)
            return Database.rows(database, *arguments)

        monkeypatch.setattr(database, "rows", counted)
        told = alarms_of(database, infos, left_out=[])
        assert [(alarm["name"], alarm["sentence"][:5]) for alarm in told] == [
            ("graders_part", "ill: "),
            ("grade_errors", "ill: "),
        ]
        assert len(asked) == 2, "two queries for all runs: each goes through the files of all"
        monkeypatch.setattr(alarms, "MOST_ROWS", 1)
        assert alarms_of(database, infos, left_out=[]) == told
        assert len(asked) == 2 + 4, "but not more rows at once than fit into memory"
