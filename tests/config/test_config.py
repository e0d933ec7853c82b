"""Option values: their sources and precedence, and which are rejected."""

import json
import re
import shlex
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import pytest

from rlvr_cli.cli import COMMANDS
from rlvr_cli.config import config_of
from rlvr_cli.config.discover import DiscoverConfig
from rlvr_cli.config.dpo import DpoConfig
from rlvr_cli.config.ei import EiConfig
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.grpo import GrpoConfig, LossType
from rlvr_cli.config.parsing.command_line import values_of
from rlvr_cli.config.parsing.options import FileFunction, NoEffect, flag, knob, options, read_value, value_type
from rlvr_cli.config.parsing.sources import CONFIGURED, resolve, resume
from rlvr_cli.config.parsing.synonyms import SYNONYMS, suggested_options
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.config.shared.training import TrainingConfig
from rlvr_cli.config.store.analyze import AnalyzeConfig
from rlvr_cli.config.store.check import CheckConfig
from rlvr_cli.config.store.filter import FilterConfig
from rlvr_cli.config.store.grade import GradeConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import GraderName


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


def test_a_path_below_the_home_directory_is_there_whatever_gives_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("RLVR_RUNS_DIR", "~")
    file = tmp_path / "c.toml"
    file.write_text('dataset = "~/q.jsonl"\nstop = ["~/"]')
    config = resolve(
        EvalConfig, flags={"config": str(file), "grader": "~/g.py:f", "tool": ("~/t.py:f",)}, command="eval"
    )
    found = (config.runs_dir, config.dataset, config.grader, config.tool, config.stop)
    assert found == ("/home/me", "/home/me/q.jsonl", "/home/me/g.py:f", ("/home/me/t.py:f",), ("~/",))
    assert resolve(EvalConfig, flags={"runs_dir": "~/runs"}, command="eval").runs_dir == "/home/me/runs"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(EvalConfig, flags={"config": "~/c.toml"}, command="eval").sources["stop"] == f"config {file}"
    several = resolve(
        EvalConfig,
        flags={
            "dataset": "~/q.jsonl,a~/b,~/r.jsonl",
            "grader": "judge:~/r.md",
            "judge_url": "http://j",
            "judge_model": "m",
        },
        command="eval",
    )
    assert several.dataset == f"{tmp_path}/q.jsonl,a~/b,{tmp_path}/r.jsonl"
    assert several.grader == f"judge:{tmp_path}/r.md"
    filtering = {"source": ("~/a",), "out": "~/a~.jsonl", "decontaminate_against": ("~b",)}
    config = resolve(FilterConfig, flags=filtering, command="filter")
    assert (config.source, config.out) == ((f"{tmp_path}/a",), f"{tmp_path}/a~.jsonl")
    assert config.decontaminate_against == ("~b",)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("num_sample = 2", "num_samples"),
        ('num_samples = "2"', "expected int"),
        ("num_samples = true", "expected int"),
        ("num_samples = 2.5", "expected int"),
        ("stop = [1]", "expected str"),
        ("dataset = [1]", "expected str or a list of them"),
        ("dataset = []", "expected str"),
        ('grader = ["gsm8k"]', "expected str"),
        ("num_samples = ", "not valid TOML"),
        (f"num_samples = {'9' * 5000}", "not valid TOML"),
        (f"sampling_temperature = {'9' * 400}", "more than 308 digits"),
        ('model = "a\\u0000b"', "null character"),
        ("config = 'x'", "not an option"),
        ("[evl]\nseed = 1", r"no command for the table \[evl\]"),
        ("num_samples = 2\nnum-samples = 3", "num_samples is given twice"),
    ],
)
def test_bad_config_files_name_file_and_key(tmp_path, text, named):
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(RlvrError, match=named) as error:
        resolve(EvalConfig, flags={"config": str(file)}, command="eval")
    assert str(file) in str(error.value)


def test_an_option_that_may_be_repeated_is_a_list_in_a_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('dataset = ["~/q.jsonl", "gsm8k"]')
    of_file = resolve(EvalConfig, flags={"config": str(file)}, command="eval")
    flags = values_of(EvalConfig, ["--dataset", "~/q.jsonl", "--dataset", "gsm8k"], command="eval")
    assert of_file.dataset == resolve(EvalConfig, flags=flags, command="eval").dataset


def test_a_file_may_begin_with_a_byte_order_mark_and_a_whole_number_is_a_float(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("\ufeffsampling_temperature = 1")
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
def test_invalid_values_are_rejected_by_option_name(values):
    with pytest.raises(RlvrError, match="--"):
        EvalConfig(**values)


@pytest.mark.parametrize(
    "values",
    [
        *({"num_examples": text} for text in ("some", "0", "-1", "²", "１", "9" * 5000)),  # int() refuses the last
        {"learning_rate": 0.0},
        {"train_batch_size": 0},
    ],
)
def test_sft_values_are_checked(values):
    with pytest.raises(RlvrError, match="--"):
        SftConfig(**values)


def test_as_many_replayed_updates_as_asked_for():
    assert [CheckConfig(replay=text).replayed_updates for text in ("", "0", "12", "all")] == [0, 0, 12, None]
    for text in ("-1", "1.5", "１", "every", "9" * 5000):
        with pytest.raises(RlvrError, match="--replay is") as caught:
            CheckConfig(replay=text)
        assert len(caught.value.problem) < 200


def test_resume_takes_the_stored_config_and_names_what_differs():
    stored = {**vars(EvalConfig(num_samples=3, stop=("x",))), "stop": ["x"]}
    stored.pop("sources")
    again = resume(resolve(EvalConfig, flags={"resume": "r", "max_batch_size": 7}, command="eval"), stored, run="r")
    assert (again.num_samples, again.stop, again.max_batch_size, again.resume) == (3, ("x",), 7, "r")
    same = resume(resolve(EvalConfig, flags={"resume": "r", "num_samples": 3}, command="eval"), stored, run="r")
    assert same.num_samples == 3
    with pytest.raises(RlvrError, match=r"--num-samples 3, not 4.*--seed 0, not 1"):
        resume(resolve(EvalConfig, flags={"resume": "r", "num_samples": 4, "seed": 1}, command="eval"), stored, run="r")


def test_auto_is_a_word_for_a_number_that_is_chosen(tmp_path):
    """It overrides a file's number and a stored one, and only where an option has it."""
    known = {f.name: f for f in options(GrpoConfig)}
    assert read_value(known["gpu_memory_utilization"], "auto") == 0.0
    assert read_value(known["gpu_memory_utilization"], "0.4") == 0.4
    with pytest.raises(RlvrError, match="--learning-rate is 'auto'"):
        read_value(known["learning_rate"], "auto")
    file = tmp_path / "c.toml"
    file.write_text('gpu_memory_utilization = "auto"\n')
    assert resolve(GrpoConfig, flags={"config": str(file)}, command="grpo").gpu_memory_utilization == 0.0
    file.write_text("gpu_memory_utilization = 0.4\n")
    assert resolve(GrpoConfig, flags={"config": str(file)}, command="grpo").gpu_memory_utilization == 0.4
    flags = {"config": str(file), "gpu_memory_utilization": 0.0}
    given = resolve(GrpoConfig, flags=flags, command="grpo")
    assert given.gpu_memory_utilization == 0.0
    assert resume(given, {"gpu_memory_utilization": 0.85}, run="r").gpu_memory_utilization == 0.0


def test_a_run_that_is_older_than_an_option_was_started_with_its_default():
    stored = {**vars(GrpoConfig()), "stop": ["</answer>"]}
    del stored["sources"], stored["importance_cap"]
    for flags in ({}, {"importance_cap": 2.0}):
        again = resume(resolve(GrpoConfig, flags=flags | {"resume": "r"}, command="grpo"), stored, run="r")
        assert again.importance_cap == 2.0
    with pytest.raises(RlvrError, match=r"--importance-cap 2\.0, not 3\.0"):
        resume(resolve(GrpoConfig, flags={"resume": "r", "importance_cap": 3.0}, command="grpo"), stored, run="r")


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (EvalConfig, {"sampling_temperature": float("inf")}),
        (EvalConfig, {"grader_timeout": float("inf")}),
        (EvalConfig, {"limit": 10**30}),
        (EvalConfig, {"engine": "transformers", "max_model_len": 64}),
        *((c, {"gpu_memory_utilization": value}) for c in (EvalConfig, EiConfig, GrpoConfig) for value in (-0.1, 2.0)),
        *((c, {"max_model_len": 0}) for c in (EvalConfig, EiConfig, GrpoConfig)),
        *((c, {"max_batch_size": 0}) for c in (EvalConfig, SftConfig, EiConfig, GrpoConfig)),
        *((c, {"seed": -1}) for c in (EvalConfig, SftConfig, EiConfig, GrpoConfig)),
        (AnalyzeConfig, {"timeout_seconds": float("nan")}),
        (AnalyzeConfig, {"timeout_seconds": -1.0}),
        (AnalyzeConfig, {"step": 10**20}),
    ],
)
def test_infinite_and_huge_numbers_are_rejected(config, values):
    with pytest.raises(RlvrError, match="--"):
        config(**values)


@pytest.mark.parametrize("config", [SftConfig, EiConfig, GrpoConfig])
def test_rounded_weights_do_not_compute_in_float32(config):
    with pytest.raises(RlvrError, match="--compute-dtype is float32, but --param-dtype bfloat16"):
        config(param_dtype="bfloat16", compute_dtype="float32")
    for compute_dtype in ("auto", "bfloat16"):
        assert config(param_dtype="bfloat16", compute_dtype=compute_dtype).compute_dtype == compute_dtype


@pytest.mark.parametrize("config", [SftConfig, EiConfig, GrpoConfig])
def test_only_adamw_is_offloaded(config):
    with pytest.raises(RlvrError, match="--optimizer adamw_kahan has no use there"):
        config(param_dtype="bfloat16", optimizer="adamw_kahan", offload_optimizer=True)
    assert config(offload_optimizer=True).offload_optimizer


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_kahan"])
def test_a_beta2_that_moments_in_bfloat16_round_away_is_refused(optimizer):
    given = {"param_dtype": "bfloat16", "optimizer": optimizer, "adam_beta2": 0.999}
    with pytest.raises(RlvrError, match=r"--adam-beta2 0\.999 is too near 1"):
        resolve(SftConfig, flags=given, command="sft")
    wide = [
        {"param_dtype": "float32", "optimizer": "adamw"},
        {"optimizer": "adamw_8bit"},
        {"lora_rank": 2},
        {"adam_beta2": 0.96},
        {"optimizer": "adamw", "offload_optimizer": True},
    ]
    for more in wide:
        assert resolve(SftConfig, flags=given | more, command="sft")
    stored = {k: v for k, v in vars(SftConfig(**given)).items() if k != "sources"}
    assert resume(resolve(SftConfig, flags={"resume": "r"}, command="sft"), stored, run="r").adam_beta2 == 0.999


def test_passes_beside_a_number_of_updates_are_refused():
    for flags in ({"sft_epochs": 2, "n_sft_steps": 3}, {"sft_epochs": 2, "preset": "quickstart"}):
        with pytest.raises(RlvrError, match="--sft-epochs has no effect with --n-sft-steps"):
            resolve(SftConfig, flags=flags, command="sft")
    assert resolve(SftConfig, flags={"sft_epochs": 2, "n_sft_steps": 0, "preset": "quickstart"}, command="sft")


def test_a_divisor_that_the_normalization_does_not_use_is_refused():
    given = {"normalize_constant": 7.0}
    with pytest.raises(
        RlvrError, match="--normalize-constant has no effect without --length-normalization masked_norm"
    ):
        resolve(SftConfig, flags=given, command="sft")
    for other in ({"length_normalization": "masked_normalize"}, {"preset": "cs336"}):
        assert resolve(SftConfig, flags=given | other, command="sft").normalize_constant == 7
    assert resolve(SftConfig, flags={"preset": "cs336", "length_normalization": "token_mean"}, command="sft")
    stored = {**given, "length_normalization": "token_mean"}
    assert resume(resolve(SftConfig, flags={"resume": "r"}, command="sft"), stored, run="r").normalize_constant == 7


@pytest.mark.parametrize(
    ("command", "preset", "loss_type", "kept"),
    [
        ("grpo", "cs336", "", {"cliprange": 0.2}),
        ("grpo", "cs336", "gspo", {"cliprange": None}),
        ("grpo", "gspo", "grpo_clip", {"cliprange": None, "cliprange_high": None}),
        ("grpo", "r1-zero", "grpo_clip", {"cliprange": 10.0}),
        ("grpo", "r1-zero", "gspo", {"cliprange": None}),
        ("grpo", "dapo", "", {"cliprange": 0.2, "cliprange_high": 0.28}),
        ("grpo", "dapo", "gspo", {"cliprange": None, "cliprange_high": None}),
        ("dpo", "simpo", "", {"beta": 2.5, "gamma": 1.375}),
        ("dpo", "simpo", "dpo", {"beta": None, "gamma": None}),
        ("dpo", "dpo", "simpo", {"beta": None}),
    ],
)
def test_what_a_preset_sets_for_its_loss_is_not_taken_with_another(tmp_path, command, preset, loss_type, kept):
    file = tmp_path / "mine.toml"
    file.write_text(f'loss_type = "{loss_type}"\n' * bool(loss_type))
    for given in ({"loss_type": loss_type} if loss_type else {}, {"config": str(file)}):
        config = resolve(config_of(command), flags={"preset": preset, **given}, command=command)
        assert {name: getattr(config, name) for name in kept} == kept
        for name, value in kept.items():
            assert config.sources[name] == ("default" if value is None else f"preset {preset}")


def test_what_a_file_or_a_flag_sets_for_a_loss_stays_with_another(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('loss_type = "grpo_clip"\ncliprange_high = 0.3\n')
    flags = {"preset": "cs336", "config": str(file), "loss_type": "gspo", "cliprange": 0.1}
    config = resolve(GrpoConfig, flags=flags, command="grpo")
    assert (config.cliprange, config.cliprange_high) == (0.1, 0.3)


def test_training_options_that_runs_were_started_with_stay_valid():
    """Otherwise such a run could not be resumed. Training limits prompts to --max-model-len with every engine."""
    assert GrpoConfig(engine="transformers", max_model_len=64).max_model_len == 64


SAMPLED = {
    "at_least 0": "seed stall_minutes sampling_temperature sampling_min_tokens",
    "at_least 1": "sampling_max_tokens max_batch_size grader_workers",
}
TRAINED = {
    "above 0": "learning_rate max_grad_norm request_timeout",
    "at_least 0": "eval_every warmup_steps weight_decay checkpoint_every checkpoint_minutes micro_batch_tokens lora_rank max_grade_errors",
    "at_least 1": "eval_examples final_eval_examples max_skipped_updates trainers lora_alpha max_model_len samplers",
}
HELD_OUT = {"at_least 0": "eval_temperature eval_min_tokens", "at_least 1": "eval_max_tokens"}
GRADED = {
    "above 0": "grader_timeout judge_timeout",
    "at_least 0": "judge_temperature judge_seed judge_retries",
    "at_least 1": "judge_max_tokens judge_concurrency",
}
SHOWN = {"at_least 0": "shots"}
PLAYED = {"above 0": "turn_timeout", "at_least 0": "max_episode_tokens", "at_least 1": "max_turns environment_workers"}
JUDGED = {**GRADED, "above 0": "judge_timeout"}
MINIMUMS = {  # of each command
    "pairwise": [JUDGED, {"at_least 0": "seed stall_minutes step", "at_least 1": "limit"}],
    "analyze": [{"above 0": "timeout_seconds normalize_constant", "at_least 0": "limit step", "at_least 1": "smooth"}],
    "runs": [{"above 0": "timeout_seconds", "at_least 0": "limit"}],
    "quickstart": [{"at_least 0": "seed"}],
    "sweep": [{"at_least 0": "stages", "at_least 1": "jobs"}],
    "view": [{"at_least 0": "port"}],
    "grade": [GRADED, {"at_least 1": "grader_workers limit"}],
    "filter": [
        {"above 0": "timeout_seconds", "at_least 0": "step seed min_pass_rate min_language_share"},
        {"at_least 1": "max_per_question ngram limit max_paragraph_words pairs_per_question"},
    ],
    "eval": [
        *(SAMPLED, GRADED, PLAYED, SHOWN),
        {"above 0": "request_timeout", "at_least 1": "num_samples limit max_model_len samplers endpoint_concurrency"},
    ],
    "sft": [
        *(SAMPLED, GRADED, PLAYED, TRAINED),
        {"above 0": "normalize_constant", "at_least 0": "n_sft_steps", "at_least 1": "train_batch_size micro_batch_size sft_epochs"},
        {"at_least 2": "packing_length"},
    ],
    "dpo": [
        *(SAMPLED, GRADED, PLAYED, TRAINED, HELD_OUT),
        {
            "above 0": "beta",
            "at_least 0": "gamma n_dpo_steps nll_coef",
            "at_least 1": "train_batch_size micro_batch_size dpo_epochs pairs_per_question rollout_batch_size",
            "at_least 2": "group_size",
        },
    ],
    "ei": [
        *(SHOWN, SAMPLED, GRADED, PLAYED, TRAINED, HELD_OUT),
        {"at_least 1": "n_ei_steps ei_batch_size group_size sft_epochs train_batch_size micro_batch_size"},
    ],
    "distill": [
        *(SHOWN, SAMPLED, GRADED, PLAYED, TRAINED, HELD_OUT),
        {"at_least 0": "task_reward", "at_least 1": "n_distill_steps rollout_batch_size group_size micro_batch_size"},
    ],
    "discover": [
        {"above 0": "request_timeout program_timeout program_memory_gb"},
        {"at_least 0": "seed stall_minutes sampling_temperature sampling_min_tokens max_tokens"},
        {"at_least 1": "sampling_max_tokens max_batch_size max_model_len samplers dim rounds num_samples parents islands"},
        {"at_least 1": "max_attempts concurrency endpoint_concurrency"},
    ],
    "grpo": [
        *(SHOWN, SAMPLED, GRADED, PLAYED, TRAINED, HELD_OUT),
        {
            "above 0": "cliprange cliprange_high importance_cap normalize_constant kimi_tau",
            "at_least 0": "kl_coef advantage_eps importance_floor format_weight length_reward length_reward_after language_reward "
            "partial_rollout_tokens",
            "at_least 1": "n_grpo_steps rollout_batch_size group_size epochs_per_rollout_batch train_batch_size "
            "gradient_accumulation_steps max_sampling_rounds overlong_buffer cispo_cap",
        },
    ],
    "ppo": [
        *(SHOWN, SAMPLED, GRADED, PLAYED, TRAINED, HELD_OUT),
        {
            "above 0": "cliprange critic_learning_rate vf_coef",
            "at_least 0": "kl_coef vf_cliprange gae_lambda gamma critic_warmup_steps",
            "at_least 1": "n_ppo_steps rollout_batch_size group_size epochs_per_rollout_batch train_batch_size micro_batch_size",
        },
    ],
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_minimum_of_a_number(command, tmp_path):
    """It holds for a flag and for a file."""
    config_type = config_of(command)
    minimums = {
        (key, o.metadata[key], o.name)
        for o in options(config_type)
        for key in ("above", "at_least")
        if o.metadata[key] is not None
    }
    assert minimums == {
        (words.split()[0], int(words.split()[1]), name)
        for group in MINIMUMS.get(command, ())
        for words, names in group.items()
        for name in names.split()
    }
    reads_file = "config" in {o.name for o in options(config_type)}
    for key, minimum, name in minimums:
        for value in (minimum if key == "above" else minimum - 1, -2):
            value = (
                float(value) if "float" in str(next(o for o in options(config_type) if o.name == name).type) else value
            )
            file = tmp_path / "c.toml"
            file.write_text(f"{name} = {value}")
            for flags in [{name: value}, {"config": str(file)}][: 1 + reads_file]:
                with pytest.raises(RlvrError) as raised:
                    resolve(config_type, flags=flags, command=command)
                assert raised.value.problem == f"--{name.replace('_', '-')} is {value}."
                assert raised.value.hint == f"It must be {key.replace('_', ' ')} {minimum}."


@pytest.mark.parametrize("command", COMMANDS)
def test_seconds_have_a_maximum(command):
    """A clock overflows far above it."""
    config_type = config_of(command)
    for option in options(config_type):
        if re.search("timeout|seconds", option.name):
            too_long: dict[str, Any] = {option.name: 31_536_001.0}
            with pytest.raises(RlvrError) as raised:
                config_type(**too_long)
            assert raised.value.problem == f"{flag(option.name)} is 31536001.0."
            assert raised.value.hint == "It must be at most 31,536,000."


def test_the_commands_that_a_file_may_configure_are_those_with_a_config_option():
    having = {c for c in COMMANDS if "config" in {o.name for o in options(config_of(c))}}
    assert {*CONFIGURED} == having


def test_a_deeply_nested_config_file_is_named(tmp_path):
    file = tmp_path / "deep.toml"
    file.write_text("a = " + "[" * 50_000)
    with pytest.raises(RlvrError, match=r"deep\.toml is nested too deeply"):
        resolve(EvalConfig, flags={"config": str(file)}, command="eval")


@pytest.mark.parametrize(
    "stored",
    [
        {"model": {}},
        {"stop": 3},
        {"num_samples": "4"},
        {"limit": [1]},
        {"seed": None},
        {"engine": 1.5},
        {"sft": {}, "seed": True},
    ],
)
def test_the_stored_options_of_a_strangers_run_have_their_types(stored):
    given = EvalConfig(resume="r", sources={"resume": "flag"})
    with pytest.raises(RlvrError, match="r: the stored option"):
        resume(given, stored, run="r")


def test_a_run_does_not_choose_which_secret_is_sent(monkeypatch):
    """A run directory may come from someone else, with the address that would get the variable's value."""
    monkeypatch.setenv("MY_OTHER_SECRET", "x")
    stored = {"model": "m", "base_url": "http://127.0.0.1:1/v1", "api_key_env": "MY_OTHER_SECRET"}
    with pytest.raises(RlvrError, match="was started with the key in MY_OTHER_SECRET") as raised:
        resume(EvalConfig(resume="r", sources={"resume": "flag"}), stored, run="r")
    assert "--api-key-env MY_OTHER_SECRET" in raised.value.hint
    named = {"resume": "flag", "api_key_env": "flag"}
    for name in ("MY_OTHER_SECRET", "OPENAI_API_KEY"):
        again = resume(EvalConfig(resume="r", api_key_env=name, sources=named), stored, run="r")
        assert (again.api_key_env, again.base_url) == (name, "http://127.0.0.1:1/v1")
    usual = resume(
        EvalConfig(resume="r", sources={"resume": "flag"}), stored | {"api_key_env": "OPENAI_API_KEY"}, run="r"
    )
    assert usual.api_key_env == "OPENAI_API_KEY"


@pytest.mark.parametrize(
    ("config", "name"),
    [(EvalConfig, "sampling_temperature"), (GrpoConfig, "sampling_temperature"), (GrpoConfig, "eval_temperature")],
)
def test_a_temperature_is_0_or_one_that_logits_can_be_divided_by(config, name):
    for wrong in (1e-42, 9e-7):
        with pytest.raises(
            RlvrError, match=rf"--{name.replace('_', '-')} is {wrong}\.\nIt must be at least 1e-06, or 0"
        ):
            config(**{name: wrong})
    config(**{name: 1e-6})


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (EvalConfig, {"sampling_min_tokens": 5, "sampling_max_tokens": 4}),
        (GrpoConfig, {"sampling_max_tokens": 64, "overlong_buffer": 65}),
    ],
)
def test_two_options_that_contradict_each_other_come_with_a_way_out(config, values):
    with pytest.raises(RlvrError) as error:
        config(**values)
    assert "exceeds" in error.value.problem
    assert error.value.hint


@pytest.mark.parametrize(
    ("config", "values", "hint"),
    [
        (EvalConfig, {"chat_thinking": "off"}, "Add --chat"),
        (GrpoConfig, {"chat_system": "Be brief."}, "Add --chat"),
        (EvalConfig, {"chat": True, "base_url": "http://localhost:8000/v1", "model": "m"}, "--endpoint chat"),
    ],
)
def test_chat_options_that_would_do_nothing_are_refused(config, values, hint):
    with pytest.raises(RlvrError, match="--chat") as error:
        config(**values)
    assert hint in error.value.hint
    config(**{"chat": True} | {name: value for name, value in values.items() if name != "base_url"})
    if "base_url" in values:
        config(**values, environment="calculator")  # whose turns become tokens here


AT_AN_ENDPOINT = {"base_url": "http://localhost:8000/v1", "model": "m"}
AT_SERVERS = {"sampler_urls": "http://localhost:8000"}


@pytest.mark.parametrize(
    ("option", "without_effect", "with_effect"),
    [
        ({"endpoint": "chat"}, {}, [AT_AN_ENDPOINT]),
        ({"api_key_env": "MY_KEY"}, AT_SERVERS, [AT_AN_ENDPOINT]),
        ({"endpoint_concurrency": 3}, AT_SERVERS, [AT_AN_ENDPOINT]),
        ({"request_timeout": 5.0}, {}, [AT_AN_ENDPOINT, AT_SERVERS]),
        ({"dtype": "float16"}, AT_AN_ENDPOINT, [{}]),
        ({"max_batch_size": 3}, AT_AN_ENDPOINT, [{}]),
        ({"cuda_graphs": False}, AT_SERVERS, [{}]),
        ({"gpu_memory_utilization": 0.5}, AT_SERVERS, [{}]),
    ],
)
@pytest.mark.parametrize("config", [EvalConfig, DiscoverConfig])
def test_an_option_of_another_place_of_the_model_is_refused(config, option, without_effect, with_effect):
    sources = dict.fromkeys(option, "flag")
    with pytest.raises(NoEffect, match="has no effect with") as caught:
        config(**option, **without_effect, sources=sources)
    assert caught.value.option in option
    for others in with_effect:
        config(**option, **others, sources=sources)
    config(**option, **without_effect, sources=dict.fromkeys(option, "c.toml"))  # a file is of several commands


@pytest.mark.parametrize(
    ("config", "option", "engine"),
    [
        *(
            (config, *of_engine)
            for config in (EvalConfig, DiscoverConfig, GrpoConfig, SftConfig)
            for of_engine in (
                ({"max_batch_size": 3}, "transformers"),
                ({"cuda_graphs": False}, "transformers"),
                ({"gpu_memory_utilization": 0.5}, "vllm"),
            )
        ),
        (GrpoConfig, {"dtype": "float16"}, "vllm"),
        (SftConfig, {"dtype": "float16"}, "vllm"),
    ],
)
def test_an_option_of_another_engine_is_refused(tmp_path, config, option, engine):
    other = {"transformers": "vllm", "vllm": "transformers"}[engine]
    file = tmp_path / "c.toml"
    file.write_text(f'engine = "{other}"')
    with pytest.raises(NoEffect, match=f"has no effect without --engine {engine}") as caught:
        resolve(config, flags={"config": str(file), **option}, command="eval")
    assert caught.value.option in option
    for chosen in ("auto", engine):
        resolve(config, flags={"config": str(file), **option, "engine": chosen}, command="eval")
    config(**option, engine=other, sources=dict.fromkeys(option, "config c.toml"))  # a file is of several commands


def test_a_rejected_key_is_not_suggested(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('config = "x"')
    with pytest.raises(RlvrError, match="'config' is not an option") as error:
        resolve(EvalConfig, flags={"config": str(file)}, command="eval")
    assert "'config'" not in error.value.hint


def test_a_value_in_place_of_a_table_is_rejected(tmp_path):
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


@dataclass(frozen=True)
class Kinds:
    """One option per kind of annotation."""

    number: int = knob(1, "", group="Data")
    perhaps: float | None = knob(None, "", group="Data")
    words: tuple[str, ...] = knob((), "", group="Data")
    switch: bool = knob(False, "", group="Data")
    choice: Literal["a", "bee"] = knob("a", "", group="Data")
    maybe: Literal["a", "bee"] | None = knob(None, "", group="Data")
    own: Literal["a", "bee"] | FileFunction = knob("a", "", group="Data")


KINDS = {option.name: option for option in fields(Kinds)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("number", (int, False, (), ())),
        ("perhaps", (float, False, (), ())),
        ("words", (str, True, (), ())),
        ("switch", (bool, False, (), ())),
        ("choice", (str, False, ("a", "bee"), ())),
        ("maybe", (str, False, ("a", "bee"), ())),
        ("own", (str, False, ("a", "bee"), ("FILE.py:FUNCTION",))),
    ],
)
def test_the_annotation_gives_the_type_of_an_option(name, expected):
    assert value_type(KINDS[name]) == expected


def test_equal_types_whose_choices_are_in_another_order_keep_their_order():
    """`Literal["a", "b"] == Literal["b", "a"]`: what is worked out once for one of them is not the other's."""

    @dataclass
    class Kinds:
        one: Literal["a", "b"] = "a"
        other: Literal["b", "a"] = "a"

    assert [value_type(field).choices for field in fields(Kinds)] == [("a", "b"), ("b", "a")]


def test_a_value_is_parsed_by_its_annotation():
    assert read_value(KINDS["number"], "12") == 12
    assert read_value(KINDS["perhaps"], "1e-3") == 0.001
    assert read_value(KINDS["choice"], "bee") == "bee"
    assert read_value(KINDS["own"], "mine.py:loss") == "mine.py:loss"
    for name, text, problem in [
        ("number", "1.5", "It takes a whole number."),
        ("perhaps", "x", "It takes a number."),
        ("perhaps", "inf", "Give a finite number."),
        ("choice", "be", "Did you mean bee?"),
        ("choice", "mine.py:loss", "Choose one of a, bee."),
        ("own", "mine.py", "Choose one of a, bee, FILE.py:FUNCTION."),
    ]:
        with pytest.raises(RlvrError) as error:
            read_value(KINDS[name], text)
        assert problem in str(error.value)


def test_choices_are_checked_for_every_source_of_a_value(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('loss_type = "grpo_clop"')
    with pytest.raises(RlvrError, match=r"--loss-type is 'grpo_clop'\. Did you mean grpo_clip\?"):
        resolve(GrpoConfig, flags={"config": str(file)}, command="grpo")
    file.write_text('loss_type = "mine.py:loss"')
    assert resolve(GrpoConfig, flags={"config": str(file)}, command="grpo").loss_type == "mine.py:loss"
    file.write_text('track = ["wandb", "tensorbord"]')
    for command in ("eval", "grpo"):
        with pytest.raises(RlvrError, match=r"--track is 'tensorbord'\. Did you mean tensorboard\?"):
            resolve(config_of(command), flags={"config": str(file)}, command=command)
    with pytest.raises(RlvrError, match="Choose one of"):
        GrpoConfig(overlong="mine.py:loss")  # type: ignore[arg-type]
    (loss_type,) = (o for o in options(GrpoConfig) if o.name == "loss_type")
    assert value_type(loss_type).choices == get_args(LossType)


def test_a_word_that_other_commands_stand_for_names_them():
    with pytest.raises(RlvrError, match="--question-order is 'easy_first'") as refused:
        GrpoConfig(question_order="easy_first")  # type: ignore[arg-type]
    filtering, training = re.findall(r"rlvr (\w+) ([^;]+)", refused.value.hint)
    values = values_of(FilterConfig, shlex.split(filtering[1])[1:], command=filtering[0])
    assert (filtering[0], FilterConfig(source=("RUN",), **values).order) == ("filter", "easy_first")
    values |= values_of(GrpoConfig, shlex.split(training[1]), command=training[0])
    assert (training[0], values["dataset"], values["question_order"]) == ("grpo", values["out"], "file")


@pytest.mark.parametrize("config", [EvalConfig, SftConfig, GrpoConfig, GradeConfig])
def test_a_mistyped_grader_suggests_the_nearest(config):
    with pytest.raises(RlvrError, match=r"--grader is 'r1zero'\. Did you mean r1_zero\?") as raised:
        config(grader="r1zero")
    assert raised.value.hint == f"Choose one of {', '.join(get_args(GraderName))}, FILE.py:FUNCTION, judge:RUBRIC.md."
    assert config().grader == ""  # chosen later
    assert config(grader="mine.py:grade").grader == "mine.py:grade"


def test_a_key_of_another_library_suggests_ours(tmp_path):
    file = tmp_path / "c.toml"
    for key, ours in (("lr", "learning_rate"), ("num_generations", "group_size"), ("group-sise", "group_size")):
        file.write_text(f"{key} = 1")
        with pytest.raises(RlvrError, match=f"Did you mean '{ours}'"):
            resolve(GrpoConfig, flags={"config": str(file)}, command="grpo")


def test_synonyms_refer_to_options_and_are_not_options():
    known = {o.name for command in COMMANDS for o in options(config_of(command))}
    for word, names in SYNONYMS.items():
        assert set(names) <= known, word
    assert suggested_options("--Learning-Rat", ["learning_rate"]) == ["learning_rate"]
    of_eval, of_grpo = ({o.name for o in options(config_of(command))} for command in ("eval", "grpo"))
    assert suggested_options("--wandb", of_grpo) == suggested_options("--report-to", of_eval) == ["track"]
    assert suggested_options("--n-samples", of_grpo) == ["group_size"]
    for command in COMMANDS:
        mine = {o.name for o in options(config_of(command))}
        for word in SYNONYMS.keys() - mine:
            assert set(suggested_options(word, mine)) <= mine, (command, word)


def test_options_of_some_training_commands_are_constants_in_the_others():
    """Trainer and plan read these fields from every training config; in sft they are constants, not options."""
    for name in ("async_steps", "kl_coef", "rollout_batch_size"):
        assert hasattr(SftConfig(), name)
        assert name not in {f.name for f in fields(SftConfig)}
    assert (SftConfig().async_steps, EiConfig().kl_coef) == (0, 0)
    config = GrpoConfig(async_steps=1, kl_coef=0.1, rollout_batch_size=512, engine="vllm")
    assert (config.async_steps, config.kl_coef, config.rollout_batch_size, config.engine) == (1, 0.1, 512, "vllm")
    assert all(issubclass(t, TrainingConfig) for t in (SftConfig, EiConfig, GrpoConfig))
    assert SftConfig(sampling_max_tokens=7).eval_sampling_params.max_tokens == 7
    assert EiConfig(sampling_max_tokens=7, eval_max_tokens=9).eval_sampling_params.max_tokens == 9


@pytest.mark.parametrize(
    ("correction", "async_steps", "expected"),
    [("auto", 0, None), ("auto", 1, 3.0), ("none", 0, None), ("none", 1, None), ("truncated", 0, 3.0), ("truncated", 1, 3.0), ("masked", 0, 3.0)],
)  # fmt: skip
def test_importance_weights_are_used_when_asked_for_or_when_the_sampler_lags(correction, async_steps, expected):
    config = GrpoConfig(importance_correction=correction, async_steps=async_steps, importance_cap=3.0)
    assert config.importance_truncation == expected
    partial = GrpoConfig(importance_correction=correction, partial_rollout_tokens=64 * async_steps, importance_cap=3.0)
    assert partial.importance_truncation == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "group"),
        ({"use_std_normalization": False}, "none"),
        ({"std_normalization": "batch"}, "batch"),
        ({"std_normalization": "none"}, "none"),
        ({"std_normalization": "group", "preset": "dr-grpo"}, "group"),
        ({"std_normalization": "batch", "use_std_normalization": True}, "batch"),
        ({"std_normalization": "none", "use_std_normalization": False}, "none"),
        ({"use_std_normalization": True, "preset": "dr-grpo"}, "group"),
        ({"std_normalization": "batch", "preset": "dr-grpo"}, "batch"),
        ({"preset": "dr-grpo"}, "none"),
        ({"std_normalization": "none", "preset": "dapo"}, "none"),
    ],
)
def test_over_what_the_standard_deviation_is_taken(given, expected):
    assert resolve(GrpoConfig, flags=given, command="grpo").std_over == expected


@pytest.mark.parametrize(
    ("given", "beta", "gamma"),
    [
        ({"preset": "dpo"}, 0.1, 0.0),
        ({"preset": "simpo"}, 2.5, 1.375),
        ({"preset": "simpo", "loss_type": "simpo"}, 2.5, 1.375),
        ({"preset": "dpo", "loss_type": "dpo_norm"}, 5.0, 0.0),
        ({"preset": "dpo", "loss_type": "simpo"}, 2.0, 1.0),
        ({"preset": "simpo", "loss_type": "dpo"}, 0.1, 0.0),
        ({"preset": "dpo", "loss_type": "mine.py:f"}, 1.0, 0.0),
        ({"preset": "dpo", "loss_type": "dpo_norm", "beta": 0.3}, 0.3, 0.0),
        ({"preset": "simpo", "loss_type": "simpo", "gamma": 0.2}, 2.5, 0.2),
    ],
)
def test_factors_of_a_presets_loss_do_not_count_for_another_one(given, beta, gamma):
    config = resolve(DpoConfig, flags=given, command="dpo")
    assert (config.scale, config.target_margin) == (beta, gamma)
    assert (config.beta is None) == (config.sources["beta"] == "default")


def test_a_file_that_names_another_loss_than_its_preset_leaves_the_presets_factors_out(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('preset = "dpo"\nloss_type = "dpo_norm"\n')
    assert resolve(DpoConfig, flags={"config": str(file)}, command="dpo").scale == 5
    file.write_text('loss_type = "dpo"\nbeta = 0.2\n')
    assert resolve(DpoConfig, flags={"config": str(file), "loss_type": "dpo_norm"}, command="dpo").scale == 0.2


def test_a_run_that_took_the_beta_of_a_presets_loss_keeps_it():
    stored = {**vars(DpoConfig(preset="dpo", loss_type="dpo_norm", beta=0.1, warmup_steps=150)), "stop": ["</answer>"]}
    del stored["sources"]
    again = resolve(DpoConfig, flags={"resume": "r", "preset": "dpo", "loss_type": "dpo_norm"}, command="dpo")
    assert resume(again, stored, run="r").scale == 0.1


@pytest.mark.parametrize(
    "given",
    [
        {"use_std_normalization": True, "std_normalization": "none"},
        {"use_std_normalization": False, "std_normalization": "group"},
        {"use_std_normalization": False, "preset": "cispo"},  # whose --std-normalization is batch
    ],
)
def test_what_is_divided_by_is_said_once(given):
    with pytest.raises(RlvrError, match="exclude each other") as refused:
        resolve(GrpoConfig, flags=given, command="grpo")
    assert "--std-normalization alone" in refused.value.hint


def test_a_resumed_run_keeps_a_normalization_that_was_said_twice():
    stored = {**vars(GrpoConfig(use_std_normalization=False, std_normalization="group")), "stop": ["</answer>"]}
    del stored["sources"]
    assert resume(resolve(GrpoConfig, flags={"resume": "r"}, command="grpo"), stored, run="r").std_over == "group"


def test_a_run_from_before_the_option_keeps_its_normalization():
    stored = {**vars(GrpoConfig(use_std_normalization=False)), "stop": ["</answer>"]}
    del stored["sources"], stored["std_normalization"]
    config = resume(resolve(GrpoConfig, flags={"resume": "r"}, command="grpo"), stored, run="r")
    assert (config.std_normalization, config.std_over) == (None, "none")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"importance_floor": 3.0}, "--importance-floor 3 exceeds --importance-cap 2."),
        ({"language": "zh", "language_detector": "py3langid"}, "--language zh has a script of its own."),
        ({"language": "xx"}, "--language is 'xx'."),
        ({"std_normalization": "groups"}, "--std-normalization is 'groups'. Did you mean group?"),
        ({"kl_type": "k1"}, "--kl-type is 'k1'."),
    ],
)
def test_options_of_the_objective_that_do_not_go_together(given, problem):
    with pytest.raises(RlvrError) as refused:
        GrpoConfig(**given)
    assert refused.value.problem.endswith(problem) or refused.value.problem.startswith(problem)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("command", "name"),
    [("grpo", "n_grpo_steps"), ("ppo", "n_ppo_steps"), ("distill", "n_distill_steps")],
)
def test_a_cosine_schedule_holds_a_run_to_its_length(command, name):
    kind = config_of(command)
    begun = resolve(kind, flags={"lr_schedule": "cosine", name: 100}, command=command)
    stored = json.loads(json.dumps({f.name: getattr(begun, f.name) for f in options(kind)}))
    longer = resolve(kind, flags={name: 400, "resume": "r"}, command=command)
    with pytest.raises(RlvrError, match=f"cosine learning-rate schedule for --{name.replace('_', '-')} 100"):
        resume(longer, stored, run="r")
    constant = resume(longer, stored | {"lr_schedule": "constant"}, run="r")
    assert getattr(constant, name) == 400
