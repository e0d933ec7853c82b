"""What the sft command decides before and beside the loop: which ids are trained on, who grades, what the plan says."""

import json
import math
import re
import shutil
import tracemalloc
from dataclasses import asdict, replace

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cache_share import CACHE_SHARE
from factories import a_rollout
from killed import SFT, rows_of, weights_of
from llamas import write_chat_llama
from rlvr_cli.commands import ei, sft
from rlvr_cli.config.ei import EiConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.data.order import epoch_order
from rlvr_cli.data.prompts import load_prompt
from rlvr_cli.errors import RlvrError
from rlvr_cli.handout import get_packed_sft_dataset
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.pretrained import load_tokenizer
from rlvr_cli.replay.stored import StoredRun, traces_of
from rlvr_cli.rollouts.grading import grader_pool
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.samplers import open as open_module
from rlvr_cli.samplers.open import Engine
from rlvr_cli.training.planning.plan import sft_objective
from rlvr_cli.training.session import evaluation_engine, load_eval_dataset
from rlvr_cli.training.traces import check_lengths, encode_traces
from rlvr_cli.types import ENVIRONMENT, Example, SampledIds


@pytest.fixture(scope="module")
def tokenizer():
    return load_policy(builtin_model_path()).tokenizer


def encoded(*traces, **options):
    prompts, responses, masks = encode_traces(*traces, **options)
    return [*map(list, prompts)], [*map(list, responses)], masks


def test_traces_take_four_bytes_a_token():
    """And what else a tokenizer tells of texts, there is of a hundred at once alone."""
    backend = Tokenizer(models.WordLevel({str(i): i for i in range(1000)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    text = " ".join(map(str, range(500, 520)))
    examples = [Example(str(i), "", "", prompt=f"{i}", response=text) for i in range(2000)]
    tracemalloc.start()
    try:
        prompts, responses, _ = encode_traces(examples, {}, tokenizer, append_eos=False)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [prompts[999][0], prompts[1000][0], list(responses[-1])] == [999, 0, [*range(500, 520)]]
    assert kept < 350 * len(examples), "two arrays each; as lists they are 1,000"
    assert most < 700 * len(examples), "all at once are 2,000 or more"
    examples[1001] = replace(examples[1001], prompt="")
    with pytest.raises(RlvrError, match="Prompt 1001 has no tokens"):
        encode_traces(examples, {}, tokenizer, append_eos=False)


def test_sampled_ids_are_trained_on_as_they_were_sampled(tokenizer):
    text = " it looks like 9 </think> <answer> 9 </answer>"
    spelled = [i for character in text for i in tokenizer(character).input_ids]  # the same text, not as it tokenizes
    assert tokenizer.decode(spelled) == text
    assert spelled != tokenizer(text).input_ids
    prompt = tokenizer("Q").input_ids
    example = Example("a", "Q", "9", prompt="Q", response=text)
    ids = {"a": SampledIds(prompt, spelled, None)}
    eos = tokenizer.eos_token_id
    assert encoded([example], ids, tokenizer, append_eos=True) == ([prompt], [[*spelled, eos]], [None])
    ended = {"a": SampledIds(prompt, [*spelled, eos], None)}
    assert encoded([example], ended, tokenizer, append_eos=True)[1] == [[*spelled, eos]]
    assert encoded([example], ids, tokenizer, append_eos=False)[1] == [spelled]


def test_ids_of_another_tokenizer_are_not_taken(tokenizer):
    example = Example("a", "Q", "9", prompt="Q", response=" 9")
    foreign = {"a": SampledIds(tokenizer("R").input_ids, tokenizer(" 8").input_ids, None)}
    expected = ([tokenizer("Q").input_ids], [[*tokenizer(" 9").input_ids, tokenizer.eos_token_id]], [None])
    assert encoded([example], foreign, tokenizer, append_eos=True) == expected
    assert encoded([example], {}, tokenizer, append_eos=True) == expected


def test_sampled_ids_with_bos_are_this_tokenizers(tmp_path):
    tokenizer = load_tokenizer(write_chat_llama(tmp_path / "llama"))
    spelled = [i for character in "3 + 3" for i in tokenizer(character, add_special_tokens=False).input_ids]
    plain = tokenizer("Q", add_special_tokens=False).input_ids
    for text in ("Q", "<s>Q"):  # BOS of the tokenizer's own, and as a chat template writes it
        ids = {"a": SampledIds([1, *plain], spelled, None)}
        example = Example("a", "Q", "9", prompt=text, response="3 + 3")
        assert encoded([example], ids, tokenizer, append_eos=False) == ([[1, *plain]], [spelled], [None])


def test_what_the_policy_did_not_write_stays_marked(tokenizer):
    prompt, response, eos = tokenizer("Q").input_ids, tokenizer(" 9").input_ids, tokenizer.eos_token_id
    example, mask = Example("a", "Q", "9", prompt="Q", response=" 9"), [False] * (len(response) - 1) + [True]
    for ids, expected in ((response, [*mask, True]), ([*response, eos], [*mask, True])):
        known = {"a": SampledIds(prompt, ids, expected[: len(ids)])}
        assert encoded([example], known, tokenizer, append_eos=True) == ([prompt], [[*response, eos]], [expected])
    of_the_environment = {"a": SampledIds(prompt, response, [not own for own in mask])}
    assert encoded([example], of_the_environment, tokenizer, append_eos=True)[1] == [response]
    turns = replace(example, turns=(("policy", " 9"), ("environment", "right")), response=" 9right")
    said = [*response, *tokenizer("right").input_ids]
    assert encoded([turns], {}, tokenizer, append_eos=True)[1] == [said]
    with pytest.raises(RlvrError, match="Trace a has tokens that the policy did not sample"):
        encoded([example], {"a": SampledIds(tokenizer("R").input_ids, response, mask)}, tokenizer, append_eos=True)


def test_turns_whose_text_ends_within_a_token_keep_their_ids(tokenizer):
    """A stop string ends the text of a turn; the token that it came with may go on."""
    prompt, turns = tokenizer("Q").input_ids, [tokenizer(text).input_ids for text in (" 7+7=14, ", "(right)", "6 ")]
    response, texts = [i for ids in turns for i in ids], (" 7+7=14,", "(right)", "6")
    ends = [(sum(map(len, turns[:n])), len("".join(texts[:n]))) for n in (1, 2, 3)]
    mask = [True] * len(turns[0]) + [False] * len(turns[1]) + [True] * len(turns[2])
    example = Example("a", "Q", "9", prompt="Q", response="".join(texts))
    known = {"a": SampledIds(prompt, response, mask, ends)}
    assert encoded([example], known, tokenizer, append_eos=False) == ([prompt], [response], [mask])
    for wrong in (
        Example("a", "Q", "9", prompt="Q", response=" 7+7=14,(right)5"),
        Example("a", "Q", "9", prompt="R", response=example.response),
    ):
        with pytest.raises(RlvrError, match="Trace a has tokens that the policy did not sample"):
            encoded([wrong], known, tokenizer, append_eos=False)


def test_what_the_policy_did_not_write_is_not_trained_on(tokenizer, tmp_path):
    prompt, text = "Q", " 9 </think> <answer> 9 </answer>"
    ids = (*tokenizer(text).input_ids, tokenizer.eos_token_id)
    mask = tuple(place >= 4 for place in range(len(ids)))
    with RunDir.create(tmp_path, "eval", name="source", metadata={}) as source:
        rollout = a_rollout(
            run_id=source.id,
            prompt=prompt,
            response=text,
            prompt_ids=tuple(tokenizer(prompt).input_ids),
            response_ids=ids,
            sampled_logprobs=(0.0,) * len(ids),
            response_mask=mask,
        )
        source.commit_rollouts("eval", 0, [rollout])
    sft.run(SftConfig(dataset="source", runs_dir=str(tmp_path), run="trained", n_sft_steps=1, train_batch_size=1))
    metrics = pq.read_table(tmp_path / "trained/metrics.parquet").to_pylist()
    assert {row["value"] for row in metrics if row["name"] == "update/tokens"} == {sum(mask)}


def test_the_evaluation_is_graded_by_its_own_dataset():
    config = SftConfig(dataset="arithmetic:10", eval_dataset="countdown", eval_examples=5)
    questions = load_eval_dataset(config)
    assert questions is not None
    assert questions.rows == 5
    assert grader_pool(config, questions.default_grader).spec == "countdown"
    assert grader_pool(config, None).spec == "r1_zero"
    assert load_eval_dataset(SftConfig(dataset="some.jsonl")) is None


def test_a_trace_longer_than_the_context_is_refused_by_name():
    examples = [Example("short", "", ""), Example("long", "", "")]
    check_lengths(examples[:1], [[1, 2]], [[3]], longest=3)
    with pytest.raises(RlvrError, match=r"long has 2 \+ 2 tokens"):
        check_lengths(examples, [[1, 2], [1, 2]], [[3], [3, 4]], longest=3)


def test_the_plan_says_what_is_minimized():
    formulas = {sft_objective(n, 7.0) for n in ("token_mean", "masked_mean", "masked_normalize")}
    assert len(formulas) == 3
    assert all(f.startswith("-(1/") for f in formulas)


@pytest.mark.slow
def test_a_finished_run_goes_on_to_more_epochs(tmp_path):
    """It ends with the weights of a run that had as many from the start."""

    def train(**given):
        flags = {"runs_dir": str(tmp_path), **given}
        sft.run(resolve(SftConfig, flags=flags, command="sft"))

    few = {
        "dataset": "arithmetic:8",
        "train_batch_size": 4,
        "learning_rate": 1e-3,
        "eval_examples": 1,
        "sampling_max_tokens": 8,
    }
    train(**few, run="whole", sft_epochs=2)
    train(**few, run="longer", sft_epochs=1)
    train(resume="longer", sft_epochs=2)
    assert weights_of(tmp_path / "longer") == weights_of(tmp_path / "whole")
    metadata = read_run(tmp_path / "longer").metadata
    assert (metadata["updates"], metadata["config"]["sft_epochs"]) == (4, 2)
    train(**few, run="counted", n_sft_steps=2)
    train(resume="counted", sft_epochs=2, n_sft_steps=0)
    assert weights_of(tmp_path / "counted") == weights_of(tmp_path / "whole")
    train(**few, run="cosine", sft_epochs=1, lr_schedule="cosine")
    with pytest.raises(RlvrError, match="has a cosine learning-rate schedule for --sft-epochs 1"):
        train(resume="cosine", sft_epochs=2)


def test_passes_for_a_run_of_so_many_updates_are_refused(tmp_path, forks):
    """They had no effect, and the run ended at once as one that is finished."""
    begin = "sft --dataset arithmetic:8 --train-batch-size 4 --n-sft-steps 1 --eval-examples 1 --sampling-max-tokens 8 --warmup-steps 2"
    told = forks.run(*begin.split(), "--run", "r", cwd=tmp_path, status=0).err
    assert "1 updates change a model little; more --n-sft-steps gives more updates" in told
    assert (
        "the warm-up (--warmup-steps 2) is longer than the run of at most 1 updates: the learning rate stays below"
        in told
    )
    stored = read_run(tmp_path / "runs/r").metadata
    refused = forks.run("sft", "--resume", "r", "--sft-epochs", "2", cwd=tmp_path, status=1).err
    assert "--sft-epochs has no effect with --n-sft-steps 1 of the run." in refused
    assert "Add --n-sft-steps 0" in refused
    assert read_run(tmp_path / "runs/r").metadata == stored
    longer = forks.run("sft", "--resume", "r", "--sft-epochs", "2", "--n-sft-steps", "0", cwd=tmp_path, status=0).err
    assert "no effect" not in longer
    assert read_run(tmp_path / "runs/r").metadata["updates"] == 4
    fewer = {"resume": str(tmp_path / "runs/r"), "sft_epochs": 1}
    with pytest.raises(RlvrError, match="has come to update 4 already, and is to end after update 2") as refused:
        sft.run(resolve(SftConfig, flags=fewer, command="sft"))
    assert refused.value.hint == "Give a larger --sft-epochs."
    assert read_run(tmp_path / "runs/r").metadata["config"]["sft_epochs"] == 2
    same = ("--n-sft-steps", "5", "--sft-epochs", "2")  # as scripts have it that `rlvr sweep --emit slurm` made
    forks.run("sft", "--resume", "r", *same, "--dry-run", cwd=tmp_path, status=0)


def test_the_plan_warns_of_no_evaluation_and_of_a_summed_loss(tmp_path, tiny_model_dir, forks):
    (tmp_path / "t.jsonl").write_text('{"prompt": "Q", "response": " R", "answer": "R"}\n' * 2)
    command = ["sft", "--model", tiny_model_dir, "--dataset", "t.jsonl", "--dry-run"]
    told = forks.run(*command, "--preset", "cs336", cwd=tmp_path, status=0).err
    assert "note: nothing is evaluated" in told
    assert "note: the loss is a sum over tokens" in told
    told = forks.run(*command, "--eval-dataset", "arithmetic:4", cwd=tmp_path, status=0).err
    assert "nothing is evaluated" not in told
    assert "a sum over tokens" not in told


def test_a_run_that_has_begun_with_a_beta2_that_is_rounded_away_says_so(capsys, tmp_path):
    for beta2 in (0.95, 0.999):
        given = {"param_dtype": "bfloat16", "optimizer": "adamw_kahan", "adam_beta2": beta2, "runs_dir": str(tmp_path)}
        sft.run(SftConfig(dataset="arithmetic:64", dry_run=True, **given))
        assert ("--adam-beta2 above 0.96 is rounded away" in capsys.readouterr().err) == (beta2 == 0.999)


def test_a_response_that_another_token_ended_gets_no_eos(tmp_path, tokenizer):
    """The ids are those of the model's generation_config.json. A run that began without them goes on so."""
    model = shutil.copytree(builtin_model_path(), tmp_path / "model")
    own, other = tokenizer.eos_token_id, tokenizer("7").input_ids[-1]
    config = json.loads((model / "generation_config.json").read_text()) | {"eos_token_id": [own, other]}
    (model / "generation_config.json").write_text(json.dumps(config))
    (prompt,), ids = (tokenizer(["3 + 4?"]).input_ids, tokenizer(" 7").input_ids)
    with RunDir.create(tmp_path, "eval", name="sampled", metadata={}) as run:
        row = a_rollout(
            run_id=run.id, prompt="3 + 4?", response=" 7", prompt_ids=tuple(prompt), response_ids=tuple(ids)
        )
        run.commit_rollouts("eval", 0, [row])
    for name, began in (("before", {}), ("after", {"other_ends": [other]})):
        with RunDir.create(tmp_path, "sft", name=name, metadata={"facts": {"dataset": began}}):
            pass
    for resume, ends in (("", [other]), ("after", [other]), ("before", [])):
        given = SftConfig(dataset="sampled", model=str(model), resume=resume, runs_dir=str(tmp_path))
        traces, examples = sft.read_traces(given, load_prompt("r1_zero"))
        found = sft.ends_besides_eos(given, traces)
        assert sft.recorded(given, traces, examples, found).get("other_ends", []) == found == ends
        (response,) = sft.encode(given, examples, traces, other_ends=found).responses
        assert list(response) == (ids if ends else [*ids, own])


def test_a_run_goes_on_with_the_thinking_that_it_began_with(tmp_path):
    """Runs of earlier versions opened it twice, where the prompt ends in <think>. A replay does as the run did."""
    row = {"question": "1 + 1?", "response": "<think> It is 2. </think> 2"}
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    for name, began in (("before", {}), ("after", {"thinking_opened": "once"})):
        with RunDir.create(tmp_path, "sft", name=name, metadata={"facts": {"dataset": began}}):
            pass
    template = load_prompt("r1_zero")
    for resume, response in (
        ("", " It is 2. </think> 2"),
        ("after", " It is 2. </think> 2"),
        ("before", row["response"]),
    ):
        config = SftConfig(dataset=str(tmp_path / "t.jsonl"), resume=resume, runs_dir=str(tmp_path))
        traces, examples = sft.read_traces(config, template)
        assert [e.response for e in examples] == [response]
        facts = {"prompt": {"name": template.name, "text": template.text}}
        facts["dataset"] = sft.recorded(config, traces, examples, [])
        assert traces_of(StoredRun(tmp_path, "sft", asdict(config), "auto", facts, [], {}))[1] == examples


def test_correct_traces_of_a_run_are_those_that_it_rewarded(tmp_path):
    """Also where its environment or a judge gave the rewards. With --grader, and in runs that began before, they are graded again."""
    right = " </think> <answer> 7 </answer>"
    rows = (("played", "", 1.0), ("lost", "", 0.0), ("failed", "", None), (right, "7", 0.0), (right + "!", "7", 0.6))
    with RunDir.create(tmp_path, "eval", name="played", metadata={}) as run:
        own = {"run_id": run.id, "grader": ENVIRONMENT}
        rows = [
            a_rollout(sample_index=i, response=response, ground_truth=truth, reward=reward, **own)
            for i, (response, truth, reward) in enumerate(rows)
        ]
        run.commit_rollouts("eval", 0, rows)
    for began in ({}, {"chosen_by": "reward"}):
        with RunDir.create(tmp_path, "sft", name=f"began-{len(began)}", metadata={"facts": {"dataset": began}}):
            pass

    template = load_prompt("r1_zero")

    def chosen(**given):
        config = SftConfig(dataset="played", correct_only=True, runs_dir=str(tmp_path), **given)
        traces, examples = sft.read_traces(config, template)
        facts = {"prompt": {"name": template.name, "text": template.text}}
        facts["dataset"] = sft.recorded(config, traces, examples, [])
        stored = StoredRun(tmp_path, "sft", asdict(config), "auto", facts, [], {})
        assert traces_of(stored)[1] == examples
        return [e.response for e in examples]

    with pytest.raises(RlvrError, match="--split nonsense is of datasets, and played is a run"):
        chosen(split="nonsense", sources={"split": "flag"})
    assert chosen() == chosen(resume="began-1") == ["played", right + "!"]
    for given in ({"grader": "r1_zero"}, {"resume": "began-0"}):
        with pytest.raises(RlvrError, match="needs a ground truth for every trace; eval-0-q0-0 has none"):
            chosen(**given)


def test_every_plan_notes_what_bfloat16_rounds_away_and_a_top_p_of_what_is_trained_on(tmp_path, capsys):
    given = {"param_dtype": "bfloat16", "sampling_top_p": 0.9, "runs_dir": str(tmp_path), "dry_run": True}
    sft.run(SftConfig(dataset="arithmetic:64", **given))
    said = capsys.readouterr().err
    assert said.count("are rounded away") == 1
    assert "another distribution" not in said  # its evaluations alone sample
    ei.run(EiConfig(dataset="arithmetic:64", ei_batch_size=8, **given))
    said = capsys.readouterr().err
    assert said.count("are rounded away") == said.count("another distribution") == 1


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_of_the_model_that_are_not_finite_are_refused_before_anything_is_done(tmp_path, value):
    """In a row that no token uses training would work, but no checkpoint could be written."""
    model = tmp_path / "model"
    shutil.copytree(builtin_model_path(), model)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][-1, 0] = value
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    given = {"dataset": "arithmetic:8", "eval_dataset": "arithmetic:4", "runs_dir": str(tmp_path / "runs")}
    with pytest.raises(RlvrError) as caught:
        sft.run(SftConfig(model=str(model), n_sft_steps=1, train_batch_size=4, run="r", **given))
    assert (
        f"{model} hold NaN or infinity, first in model.embed_tokens.weight (model.safetensors)" in caught.value.problem
    )
    assert list((tmp_path / "runs/r/rollouts").iterdir()) == []


def test_an_engine_for_evaluations_needs_questions(tmp_path, forks):
    (tmp_path / "t.jsonl").write_text('{"prompt": "1 + 1?", "response": " 2"}\n' * 4)
    for options in ("--samplers 2", "--sampler-urls http://127.0.0.1:9", "--engine vllm"):
        done = forks.run("sft", "--dataset", "t.jsonl", *options.split(), cwd=tmp_path, status=1)
        assert f"{options.split()[0]} is for evaluations here, and there are no evaluation questions." in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("option", [{"dtype": "bfloat16"}, {"max_model_len": 64}, {"gpu_memory_utilization": 0.5}])
def test_options_of_vllm_are_refused_without_it(tmp_path, option):
    (name,) = option
    problem = f"--{name.replace('_', '-')} is of vLLM, which answers evaluations here only with --engine vllm."
    flags = {"dataset": "arithmetic:8", "runs_dir": str(tmp_path), **option}
    config = resolve(SftConfig, flags=flags, command="sft")
    with pytest.raises(RlvrError, match=problem) as raised:
        sft.run(config)
    assert raised.value.hint == "Leave it out, or add --engine vllm."


def test_beside_servers_options_of_vllm_have_no_engine_to_add():
    flags = {"eval_dataset": "arithmetic:8", "sampler_urls": "http://127.0.0.1:9", "max_model_len": 64}
    config = resolve(SftConfig, flags=flags, command="sft")
    with pytest.raises(RlvrError, match="--max-model-len is of vLLM") as raised:
        evaluation_engine(config, load_eval_dataset(config))
    assert raised.value.hint == "Leave it out."


def test_auto_is_transformers_where_vllm_is_the_default_of_others(monkeypatch):
    """Otherwise a run could not go on with another number of --samplers, which is free on resume."""
    monkeypatch.setattr(open_module, "_automatic", lambda: Engine("vllm", "as on a machine that has it"))
    for samplers in (1, 2):
        config = SftConfig(samplers=samplers)
        assert evaluation_engine(config, load_eval_dataset(config)).name == "transformers"


@pytest.mark.slow
def test_a_prompt_that_is_too_long_for_the_processes_is_refused_before_training(tmp_path, forks):
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "1 + " * 3000 + "1?", "answer": "3001"}) + "\n")
    command = "sft --dataset arithmetic:16 --eval-dataset q.jsonl --samplers 2"
    done = forks.run(*command.split(), cwd=tmp_path, status=1)
    assert "has a prompt of" in done.err
    assert "allow only shorter responses: --sampling-max-tokens." in done.err


@pytest.mark.vllm
@pytest.mark.parametrize("adapter", ["", "--lora-rank 4"], ids=["weights", "adapter"])
def test_vllm_answers_the_evaluations(forks, tmp_path, adapter):
    options = [*adapter.split(), "--sampling-temperature", "0"]
    forks.run(*SFT, *options, "--run", "one", cwd=tmp_path, status=0)
    vllm = ("--engine", "vllm", "--max-model-len", "256", "--gpu-memory-utilization", CACHE_SHARE)
    forks.run(*SFT, *options, *vllm, "--run", "two", cwd=tmp_path, status=0)
    one, two = (tmp_path / "runs" / name for name in ("one", "two"))
    assert weights_of(two) == weights_of(one)
    assert [row["response_ids"] for row in rows_of(two, phase="eval")] == [
        row["response_ids"] for row in rows_of(one, phase="eval")
    ]
    assert read_run(two).metadata["sampler"]["engine"] == "vllm"


@pytest.fixture
def windowed(tiny_model_dir, tmp_path):
    """A directory with a model whose attention has a sliding window, which the embedded engine refuses."""
    shutil.copytree(tiny_model_dir, tmp_path / "windowed")
    path = tmp_path / "windowed/config.json"
    windows = {"use_sliding_window": True, "sliding_window": 32, "layer_types": ["sliding_attention"] * 2}
    path.write_text(json.dumps(json.loads(path.read_text()) | windows))
    return path.parent


@pytest.mark.slow
def test_a_model_with_a_sliding_window_trains_without_evaluations(windowed, tmp_path, forks):
    rows = [f'{{"prompt": "{i} + {i}?", "response": " {2 * i}", "answer": "{2 * i}"}}\n' for i in range(8)]
    (tmp_path / "t.jsonl").write_text("".join(rows))
    command = ["sft", "--model", windowed, "--dataset", "t.jsonl", "--train-batch-size", 4, "--learning-rate", 1e-2]
    forks.run(*command, "--run", "s", cwd=tmp_path, status=0)
    before, after = (load_policy(path).weights() for path in (windowed, tmp_path / "runs/s/model"))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert read_run(tmp_path / "runs/s").metadata["updates"] == 2
    done = forks.run(*command, "--eval-dataset", "arithmetic:4", "--run", "e", cwd=tmp_path, status=1)
    assert "The embedded engine cannot sample from Qwen2ForCausalLM" in done.err
    assert "without --eval-dataset" in done.err


def test_packing_changes_no_update_on_the_same_examples(forks, tmp_path):
    traces = [{"prompt": f"{i}{i}?", "response": " so it is " + f"{i}" * (i % 7)} for i in range(24)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in traces))
    command = ["sft", "--dataset", "t.jsonl", "--sft-epochs", "2", "--train-batch-size", "64"]
    packed = "--packing --packing-length 64 --micro-batch-size 2".split()
    forks.run(*command, "--run", "rows", cwd=tmp_path, status=0)
    told = forks.run(*command, *packed, "--run", "packed", cwd=tmp_path, status=0).err
    assert re.search(r"sequences of 64 tokens, \d\d\.\d% full; attention stays within an example", told)
    assert "micro-batches  up to 128 tokens" in told
    rows, whole = (logged(tmp_path / "runs" / name) for name in ("rows", "packed"))
    for update in range(2):
        for name in ("loss/objective", "loss/nll", "policy/entropy", "optimizer/grad_norm"):
            assert whole[update, name] == pytest.approx(rows[update, name], abs=1e-6, rel=1e-5)
        assert whole[update, "update/rows"] == 24
        assert whole[update, "update/tokens"] == rows[update, "update/tokens"]
        assert whole[update, "update/computed"] <= 128 * whole[update, "update/micro_batches"]
        assert whole[update, "update/micro_batches"] <= 24 / 4
    told = forks.run(*command, *packed, "--packing-attend-across", "--run", "across", cwd=tmp_path, status=0).err
    assert "attention crosses from one example into the next" in told
    across = logged(tmp_path / "runs/across")
    assert across[0, "update/rows"] == round(across[0, "update/computed"] / 64) > 5
    assert abs(across[0, "loss/nll"] - rows[0, "loss/nll"]) > 1e-2


def test_loss_on_prompts_is_that_of_the_courses_packed_dataset(forks, tmp_path):
    """Of one update on all sequences, of documents in the order in which they are packed."""
    rows = [{"prompt": f"{i}+{i}?", "response": f" {2 * i} it is"} for i in range(9)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    order = epoch_order(9, seed=0, epoch=-2)
    (tmp_path / "ordered.jsonl").write_text("".join(json.dumps(rows[i]) + "\n" for i in order))
    policy = load_policy(builtin_model_path(), device="cpu")
    course = get_packed_sft_dataset(policy.tokenizer, tmp_path / "ordered.jsonl", 32, shuffle=False)
    ids, labels = (torch.stack([one[name] for one in course]) for name in ("input_ids", "labels"))
    with torch.inference_mode():
        expected = torch.nn.functional.cross_entropy(
            policy.forward(input_ids=ids).logits.flatten(0, 1), labels.flatten()
        )
    command = "sft --dataset t.jsonl --question-field prompt --prompt alpaca.prompt --packing --packing-length 32 --n-sft-steps 1".split()
    (tmp_path / "alpaca.prompt").write_text(load_prompt("alpaca").text)
    command += ["--train-batch-size", len(course), "--micro-batch-size", 4]
    for name, options in (("across", ["--packing-attend-across"]), ("whole", ["--packing-length", 200])):
        told = forks.run(*command, *options, "--loss-on-prompts", "--run", name, cwd=tmp_path, status=0).err
        assert ", prompts included" in told
    across, whole = (logged(tmp_path / "runs" / name) for name in ("across", "whole"))
    assert across[0, "update/tokens"] == labels.numel()
    assert across[0, "loss/nll"] == pytest.approx(expected.item(), abs=1e-5)
    nats, tokens = 0.0, 0
    for row in rows:
        text = policy.tokenizer.encode(load_prompt("alpaca").fill(row["prompt"]) + row["response"])
        found = torch.tensor([[*text, policy.tokenizer.eos_token_id]])
        with torch.inference_mode():
            logits = policy.forward(input_ids=found).logits[0, :-1]
        nats += torch.nn.functional.cross_entropy(logits, found[0, 1:], reduction="sum").item()
        tokens += found.shape[1] - 1
    assert whole[0, "update/tokens"] == tokens
    assert whole[0, "loss/nll"] == pytest.approx(nats / tokens, abs=1e-5)


def logged(run):
    """(update, name) -> value, of training."""
    table = pq.read_table(run / "metrics.parquet").to_pylist()
    return {(row["step"], row["name"]): row["value"] for row in table if row["phase"] == "train"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--packing-length 64", "--packing-length needs --packing."),
        ("--packing-attend-across", "--packing-attend-across needs --packing."),
        ("--packing --packing-attend-across --length-normalization masked_mean", "which --packing-attend-across cuts into pieces"),
        ("--packing --packing-length 20", "tokens, and a packed sequence has 20."),
        ("--packing --packing-attend-across --packing-length 4000", "too few for a packed sequence of 4000"),
    ],
)  # fmt: skip
def test_packing_that_cannot_be_is_refused_before_the_model_is_loaded(
    tmp_path, tiny_model_dir, forks, options, problem
):
    command = ["sft", "--model", tiny_model_dir, "--dataset", "arithmetic:8", *options.split()]
    done = forks.run(*command, cwd=tmp_path)
    assert done.status in (1, 2)  # of options alone: 2
    assert problem in done.err
    assert not (tmp_path / "runs").exists()


def test_a_sequence_that_is_joined_fits_the_context(tmp_path, tiny_model_dir, forks):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    command = "sft --model short --dataset arithmetic:16 --sampling-max-tokens 8 --packing --packing-attend-across --packing-length".split()
    done = forks.run(*command, 101, cwd=tmp_path, status=1)
    assert "The model's context holds 100 tokens." in done.err
    assert "--packing-length 100 or less" in done.err
