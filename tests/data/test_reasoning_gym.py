"""Datasets of reasoning-gym: what a specification means, that it always gives the same questions, and runs on them."""

import json
import os

import pytest

from checks import findings
from rlvr_cli.commands import eval as evaluation
from rlvr_cli.commands import grpo
from rlvr_cli.commands.store import grade
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.config.shared.questions import split_datasets
from rlvr_cli.config.store.grade import GradeConfig
from rlvr_cli.data import reasoning_gym
from rlvr_cli.data.datasets import evaluation_spec, load_dataset
from rlvr_cli.data.reasoning_gym import GymSpec, parse
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import read_rollouts, read_run

needs_package = pytest.mark.extra("reasoning_gym")
MIXTURE = 'reasoning-gym:composite,datasets=[{"name":"gcd","weight":2},{"name":"lcm"}],size=9,seed=3'


def test_a_specification_has_options_of_any_kind():
    assert parse("reasoning-gym:gcd") == GymSpec("gcd", {}, 500, 0)
    assert parse("reasoning-gym:gcd", limit=7, seed=4) == GymSpec("gcd", {}, 7, 4)
    assert parse("reasoning-gym:gcd,size=9,seed=2", limit=7, seed=4) == GymSpec("gcd", {}, 9, 2)
    options = 'a=1,b=1.5,c=true,d=["+","-"],e=easy,f={"x":[1,2]}'
    assert parse(f"reasoning-gym:gcd,{options}").config == {
        "a": 1, "b": 1.5, "c": True, "d": ["+", "-"], "e": "easy", "f": {"x": [1, 2]},
    }  # fmt: skip
    for spec in (f"reasoning-gym:gcd,{options},size=500,seed=0", MIXTURE):
        assert parse(spec).name == spec


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("size", "'size' in .* is not KEY=VALUE"),
        ("=3", "is not KEY=VALUE"),
        ("size=2,size=3", "'size=3' in .* is given twice"),
        ("size=0", "The size in .* is not a number of questions"),
        ("size=true", "The size in"),
        ("size=many", "The size in"),
        ("seed=-1", "The seed in .* is not a whole number from 0 to 999"),
        ("seed=1000", "The seed in"),
    ],
)
def test_a_bad_specification_is_said(options, problem):
    with pytest.raises(RlvrError, match=problem):
        load_dataset(f"reasoning-gym:gcd,{options}")


def test_options_of_a_family_do_not_begin_another_dataset():
    assert split_datasets("gsm8k,math") == ("gsm8k", "math")
    assert split_datasets("gsm8k,a[1,b=2].jsonl") == ("gsm8k", "a[1", "b=2].jsonl")
    assert split_datasets(f"gsm8k,reasoning-gym:gcd,size=9,seed=1,{MIXTURE},math") == (
        "gsm8k", "reasoning-gym:gcd,size=9,seed=1", MIXTURE, "math",
    )  # fmt: skip
    assert EvalConfig(dataset=f"{MIXTURE},gsm8k").datasets == (MIXTURE, "gsm8k")


def test_evaluations_have_the_same_options_and_their_own_size():
    assert evaluation_spec("reasoning-gym:gcd,size=9,max_value=5,seed=1") == "reasoning-gym:gcd,max_value=5,seed=1"
    assert (evaluation_spec("arithmetic:5"), evaluation_spec("mine.jsonl")) == ("arithmetic", "")


def test_what_questions_alone_cannot_do():
    with pytest.raises(
        RlvrError, match=r"(?s)no traces to train on.*rlvr eval --dataset reasoning-gym:gcd --num-samples 8"
    ):
        load_dataset("reasoning-gym:gcd", purpose="traces")
    with pytest.raises(RlvrError, match="no split 'test'"):
        load_dataset("reasoning-gym:gcd", split="test")
    with pytest.raises(RlvrError, match="its fields cannot be chosen"):
        load_dataset("reasoning-gym:gcd", question_field="q")


@needs_package
@pytest.mark.parametrize(
    ("family", "config", "problem"),
    [
        ("gdc", {}, r"(?s)no family 'gdc'. Did you mean 'gcd'\?.*Its families are ab, acre, .*zebra_puzzles"),
        ("gcd", {"max_valu": 3}, r"(?s)no option 'max_valu'. Did you mean 'max_value'\?.*size, seed, min_numbers"),
        ("gcd", {"max_value": "x"}, 'max_value of gcd is "x", and its default 1000'),
        ("gcd", {"max_value": True}, "max_value of gcd is true"),
        (
            "basic_arithmetic",
            {"operators": "+"},
            r'operators of basic_arithmetic is "\+", and its default \["\+", "-", "\*", "/"\]',
        ),
        ("gcd", {"max_value": 1.5}, "max_value of gcd is 1.5"),
        ("composite", {}, "The datasets of composite are null, not a list of objects"),
        ("composite", {"datasets": ["gcd"]}, r'The datasets of composite are \["gcd"\], not a list of objects'),
        ("composite", {"datasets": [{"weight": 2}]}, "is not a name, a number as weight and"),
        ("composite", {"datasets": [{"name": "gcd", "weight": "2"}]}, "is not a name, a number as weight and"),
        ("composite", {"datasets": [{"name": "gcd", "config": [1]}]}, "is not a name, .* and an object as config"),
        (
            "composite",
            {"datasets": [{"name": "gcd", "wieght": 2}]},
            r"(?s)no key 'wieght'. Did you mean 'weight'\?.*Its keys are name",
        ),
        ("composite", {"datasets": [{"name": "lcm"}, {"name": "gdc"}]}, r"no family 'gdc'. Did you mean 'gcd'\?"),
        (
            "composite",
            {"datasets": [{"name": "gcd", "config": {"max_valu": 3}}]},
            r"no option 'max_valu'. Did you mean 'max_value'\?",
        ),
        ("composite", {"datasets": [{"name": "composite"}]}, "A composite of reasoning-gym holds another one"),
    ],
)
def test_a_family_has_its_options(family, config, problem):
    with pytest.raises(RlvrError, match=problem):
        reasoning_gym.checked(GymSpec(family, config, 1))


@needs_package
def test_parts_of_a_mixture_may_have_a_seed_of_their_own():
    for spec in (reasoning_gym.MIXTURE, 'reasoning-gym:composite,datasets=[{"name":"gcd","config":{"seed":3}}]'):
        assert reasoning_gym.checked(parse(spec)) == parse(spec).config


@needs_package
def test_what_the_package_refuses_is_said():
    with pytest.raises(RlvrError, match=r"cannot make the questions of gcd with {'max_value': -5}: max_value must be"):
        load_dataset("reasoning-gym:gcd,max_value=-5")


@needs_package
def test_the_same_questions_in_every_process(monkeypatch):
    """polynomial_multiplication follows Python's hash seed. The first n questions do not depend on the size, only on the seed."""
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    one = load_dataset("reasoning-gym:polynomial_multiplication,size=20", purpose="train")
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    two = load_dataset("reasoning-gym:polynomial_multiplication,size=30", purpose="train", limit=25)
    assert (one.rows, two.rows, two.default_grader) == (20, 25, "reasoning_gym")
    assert two.name == "reasoning-gym:polynomial_multiplication,size=30,seed=0"
    assert two.examples[:20] == one.examples
    assert os.environ["PYTHONHASHSEED"] == "2"


@needs_package
def test_no_question_is_given_twice_in_a_split_or_across_seeds():
    """tower_of_hanoi has some 90 questions: all are in one of the splits, whatever the seed."""
    train, validation = (load_dataset("reasoning-gym:tower_of_hanoi,seed=1", purpose=p) for p in ("train", "eval"))
    questions = [e.question for d in (train, validation) for e in d.examples]
    assert len(set(questions)) == len(questions) > 80
    assert train.notes == [f"{train.name} has only {train.rows} different questions in its train split."]
    assert (train.split, validation.split) == ("train", "validation")
    again = load_dataset("reasoning-gym:tower_of_hanoi,seed=2", purpose="train")
    assert {e.question for e in again.examples} == {e.question for e in train.examples}
    assert [e.question for e in again.examples] != [e.question for e in train.examples]


@needs_package
@pytest.mark.slow
def test_seeds_that_follow_each_other_share_no_draws():
    """The package draws question i from seed + i: its seeds 0 and 1 share all questions but one."""
    one, two = (
        {e.question for e in load_dataset(f"reasoning-gym:gcd,size=300,seed={seed}").examples} for seed in (0, 1)
    )
    assert len(one & two) < 10


@pytest.fixture
def bare(tmp_path) -> str:
    path = tmp_path / "bare.prompt"
    path.write_text("{question} <answer>")
    return str(path)


@needs_package
def test_a_family_is_evaluated_and_graded_again(tmp_path, tiny_model_dir, bare):
    config = EvalConfig(
        model=str(tiny_model_dir), dataset="reasoning-gym:gcd", limit=3, prompt=bare, sampling_max_tokens=8,
        run="r", runs_dir=str(tmp_path), grader_workers=1,
    )  # fmt: skip
    evaluation.run(config)
    run = tmp_path / "r"
    facts = read_run(run).metadata["facts"]
    assert facts["grader"] == "reasoning_gym"
    assert facts["dataset"]["name"] == "reasoning-gym:gcd,size=3,seed=0"
    rows = read_rollouts(run).to_pylist()
    assert [json.loads(row["ground_truth"])["family"] for row in rows] == ["gcd"] * 3
    assert all(row["reward"] == 0.0 and row["grade_error"] is None for row in rows)
    assert not findings(run)
    grade.run(GradeConfig(run=("r",), grader="reasoning_gym", runs_dir=str(tmp_path), grader_workers=1))
    assert len(list((run / "grades").glob("reasoning_gym-eval-*.parquet"))) == 1


@needs_package
@pytest.mark.slow
def test_a_family_is_trained_on_and_resumes(tmp_path, tiny_model_dir, bare):
    config = GrpoConfig(
        model=str(tiny_model_dir), dataset="reasoning-gym:gcd,size=16,max_value=50", prompt=bare, n_grpo_steps=2,
        rollout_batch_size=8, group_size=4, train_batch_size=8, gradient_accumulation_steps=1, sampling_max_tokens=8,
        eval_every=1, eval_examples=5, eval_max_tokens=8, run="r", runs_dir=str(tmp_path), grader_workers=1,
    )  # fmt: skip
    grpo.run(config)
    grpo.run(resolve(GrpoConfig, flags={"resume": "r", "runs_dir": str(tmp_path), "n_grpo_steps": 3}, command="grpo"))
    facts = read_run(tmp_path / "r").metadata["facts"]
    assert facts["dataset"]["name"] == "reasoning-gym:gcd,max_value=50,size=16,seed=0"
    assert facts["eval_dataset"]["name"] == "reasoning-gym:gcd,max_value=50,size=5,seed=0"
    rows = read_rollouts(tmp_path / "r").to_pylist()
    trained, evaluated = ({r["prompt"] for r in rows if r["phase"] == phase} for phase in ("train", "eval"))
    assert trained
    assert evaluated
    assert not trained & evaluated
    assert not findings(tmp_path / "r")
