"""Where values come from, and what is refused."""

import pytest

from rlvr_cli.config.analyze import AnalyzeConfig
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.config.sources import resolve, resume
from rlvr_cli.errors import RlvrError


def test_flag_beats_table_beats_top_level_beats_default(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(
        'seed = 1\nnum-samples = 2\nlimit = 3\n[eval]\nnum_samples = 4\nstop = ["a", "b"]\n[sft]\nsft-epochs = 9\n'
    )
    config = resolve(EvalConfig, flags={"limit": 5, "config": str(file)}, command="eval")
    assert (config.seed, config.num_samples, config.limit, config.stop, config.prompt) == (
        1,
        4,
        5,
        ("a", "b"),
        "r1_zero",
    )
    where = {k: config.sources[k] for k in ("seed", "num_samples", "limit", "prompt")}
    assert where == {"seed": f"config {file}", "num_samples": f"config {file}", "limit": "flag", "prompt": "default"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("num_sample = 2", "num_samples"),
        ('num_samples = "2"', "expected int"),
        ("num_samples = true", "expected int"),
        ("num_samples = 2.5", "expected int"),
        ("stop = [1]", "expected str"),
        ("num_samples = ", "not valid TOML"),
        ("config = 'x'", "no option"),
    ],
)
def test_bad_config_files_name_file_and_key(tmp_path, text, named):
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(RlvrError, match=named) as error:
        resolve(EvalConfig, flags={"config": str(file)}, command="eval")
    assert str(file) in str(error.value)


def test_a_whole_number_is_a_float(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("sampling_temperature = 1")
    config = resolve(EvalConfig, flags={"config": str(file)}, command="eval")
    assert isinstance(config.sampling_temperature, float)


@pytest.mark.parametrize(
    "values",
    [
        {"num_samples": 0},
        {"limit": 0},
        {"sampling_temperature": -0.1},
        {"sampling_temperature": float("nan")},
        {"sampling_top_p": 0.0},
        {"sampling_min_tokens": 5, "sampling_max_tokens": 4},
        {"engine": "tgi"},
        {"engine": "openai"},
        {"base_url": "http://localhost:1", "engine": "vllm", "model": "m"},
        {"grader_timeout": 0.0},
        {"seed": -1},
    ],
)
def test_values_that_make_no_sense_are_refused_by_option_name(values):
    with pytest.raises(RlvrError, match="--"):
        EvalConfig(**values)


@pytest.mark.parametrize(
    "values", [{"num_examples": "some"}, {"num_examples": "0"}, {"learning_rate": 0.0}, {"train_batch_size": 0}]
)
def test_sft_values_are_checked(values):
    with pytest.raises(RlvrError, match="--"):
        SftConfig(**values)


def test_resume_takes_the_stored_config_and_names_what_differs():
    stored = {**vars(EvalConfig(num_samples=3, stop=("x",))), "stop": ["x"]}
    stored.pop("sources")
    again = resume(resolve(EvalConfig, flags={"resume": "r", "max_batch_size": 7}, command="eval"), stored, run="r")
    assert (again.num_samples, again.stop, again.max_batch_size, again.resume) == (3, ("x",), 7, "r")
    same = resume(resolve(EvalConfig, flags={"resume": "r", "num_samples": 3}, command="eval"), stored, run="r")
    assert same.num_samples == 3
    with pytest.raises(RlvrError, match=r"--num-samples 3, not 4.*--seed 0, not 1"):
        resume(resolve(EvalConfig, flags={"resume": "r", "num_samples": 4, "seed": 1}, command="eval"), stored, run="r")


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (EvalConfig, {"sampling_temperature": float("inf")}),
        (EvalConfig, {"grader_timeout": float("inf")}),
        (EvalConfig, {"limit": 10**30}),
        (EvalConfig, {"gpu_memory_utilization": 0.0}),
        (EvalConfig, {"engine": "transformers", "max_model_len": 64}),
        (AnalyzeConfig, {"timeout_seconds": float("nan")}),
        (AnalyzeConfig, {"timeout_seconds": -1.0}),
        (AnalyzeConfig, {"step": 10**20}),
    ],
)
def test_numbers_that_nothing_can_take_are_refused(config, values):
    with pytest.raises(RlvrError, match="--"):
        config(**values)


def test_a_value_where_a_table_belongs_is_refused(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("eval = 5\n")
    with pytest.raises(RlvrError, match=r"\[eval\]"):
        resolve(EvalConfig, flags={"config": str(file)}, command="eval")


def test_an_empty_stop_string_means_none():
    assert EvalConfig(stop=("",)).sampling_params.stop == ()
    assert EvalConfig(stop=("a", "")).sampling_params.stop == ("a",)
    params = EvalConfig(
        sampling_temperature=0.5, sampling_top_p=0.9, sampling_max_tokens=7, sampling_min_tokens=2
    ).sampling_params
    assert (params.temperature, params.top_p, params.max_tokens, params.min_tokens) == (0.5, 0.9, 7, 2)
