"""`--chat` through the command line: what models are sent, trained on and saved with; what is refused, resumed and replayed."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from chat_models import write_chat_model
from checks import findings
from llamas import write_byte_level_llama, write_chat_llama, write_chat_qwen
from rlvr_cli.commands import dpo, sft
from rlvr_cli.config.dpo import DpoConfig
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.data.prompts import PromptTemplate
from rlvr_cli.data.traces import load_traces
from rlvr_cli.models.pretrained import load_tokenizer
from rlvr_cli.replay.run import replay_run
from rlvr_cli.replay.stored import read_stored
from rlvr_cli.runs.readers import fact_of, read_metadata, read_rollouts, read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.training.read_traces import end_of_turn
from rlvr_cli.training.traces import encode_traces

GRADER = """
def grade(response, truth):
    return {"reward": len(response) % 3 / 2}
"""
COMMON = [
    "--prompt", "question_only", "--grader", "mine.py:grade", "--grader-workers", 1, "--sampling-max-tokens", 8,
    "--sampling-min-tokens", 0,
]  # fmt: skip
TRAINING = [
    *COMMON,
    "--eval-dataset",
    "d.jsonl",
    "--eval-examples",
    1,
    "--learning-rate",
    1e-4,
    "--checkpoint-every",
    1,
]
GRPO = ["grpo", "--dataset", "d.jsonl", *TRAINING, "--n-grpo-steps", 2, "--rollout-batch-size", 8, "--group-size", 4]
GRPO += ["--train-batch-size", 8, "--gradient-accumulation-steps", 2]
EI = ["ei", "--dataset", "d.jsonl", *TRAINING, "--n-ei-steps", 2, "--ei-batch-size", 2, "--group-size", 4]
EI += ["--train-batch-size", 4]
SFT = ["sft", "--dataset", "t.jsonl", *TRAINING, "--train-batch-size", 2, "--n-sft-steps", 2]
EVAL = ["eval", "--dataset", "d.jsonl", *COMMON]
LLAMA = "<s><|user|>\n26 Jul 2024\n{question}<|end|>\n<|assistant|>\n"
QWEN = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Questions, worked solutions, a grader, and two models to chat with; the working directory."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(4)]
    traces = [r | {"answer": f"{r['answer']} it is.\n#### {r['answer']}"} for r in rows]
    for name, of in (("d", rows), ("t", traces)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of))
    (tmp_path / "mine.py").write_text(GRADER)
    write_chat_llama(tmp_path / "llama")
    write_chat_qwen(tmp_path / "qwen")
    return tmp_path


@pytest.fixture
def rlvr(place, forks):
    """Run the command line; `Done`, once it has ended with this status and without a traceback."""
    return lambda *arguments, status=0, **more: forks.run(*arguments, cwd=place, status=status, **more)


def check_prompts(run: Path, template: str, tokenizer: Path) -> None:
    """Each prompt is the template's, its ids are those of the text and have one BOS if the text has."""
    encode = load_tokenizer(tokenizer)
    rows = read_rollouts(run).to_pylist()
    assert rows
    for row in rows:
        question = row["prompt"].removeprefix(template.partition("{question}")[0]).partition("?")[0] + "?"
        assert row["prompt"] == template.replace("{question}", question)
        assert row["prompt_ids"] == encode(row["prompt"], add_special_tokens=False).input_ids
        assert row["prompt_ids"].count(encode.bos_token_id) == template.count("<s>")
    start = template.index("{question}")
    assert read_run(run).metadata["facts"]["prompt"] == {"name": "question_only", "text": template, "start": start}
    assert findings(run) == []


def check_replay(run: Path) -> None:
    found = replay_run(read_stored(run), most=None)
    assert (found.problems, len(found.updates)) == ([], found.logged)
    assert found.logged > 0


def test_eval_sends_the_chat_template(place, rlvr):
    done = rlvr(*EVAL, "--model", "llama", "--chat", "--run", "llama")
    assert f"prompt   question_only in the model's chat template: {LLAMA!r}" in done.err
    check_prompts(place / "runs/llama", LLAMA, place / "llama")
    rlvr(*EVAL, "--model", "qwen", "--chat", "--chat-thinking", "off", "--chat-system", "Be brief.", "--run", "off")
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    check_prompts(place / "runs/off", system + QWEN + "<think>\n\n</think>\n\n", place / "qwen")
    done = rlvr(*EVAL, "--model", "llama", "--run", "plain")
    assert "chat template" not in done.err
    encode = load_tokenizer(place / "llama")
    for row in read_rollouts(place / "runs/plain").to_pylist():
        assert row["prompt_ids"] == [1, *encode(row["prompt"], add_special_tokens=False).input_ids]
    diff = rlvr("analyze", "config_diff", "llama", "off", "plain", "--format", "json").out
    found = {(d["run_id"], d["option"]) for d in json.loads(diff)}
    assert {("off", "chat_thinking"), ("off", "chat_system"), ("off", "(prompt sha256)")} <= found
    assert ("plain", "(prompt sha256)") in found


def test_the_r1_zero_prompt_in_a_chat_is_noted(place, rlvr):
    arguments = ["ei", "--dataset", "d.jsonl", "--ei-batch-size", 2, "--model", "qwen", "--chat", "--dry-run"]
    assert "note: the prompt r1_zero writes a conversation of its own" in rlvr(*arguments).err
    assert "r1_zero" not in rlvr(*arguments, "--prompt", "question_only").err


def test_grpo_trains_on_what_it_sends_and_goes_on_after_a_kill(place, rlvr):
    """Of Llama's template, whose prompts have a BOS: `test_ei_trains_on_what_it_sends`."""
    arguments = [*GRPO, "--model", "qwen", "--chat", "--run", "g"]
    rlvr(*arguments, fault="update:2", status=-signal.SIGKILL)
    run, chat = place / "runs/g", place / "qwen" / "chat_template.jinja"
    kept = chat.read_text()
    chat.write_text(kept.replace("\n{%", "!\n{%"))
    refused = rlvr("grpo", "--resume", "g", status=1)
    assert "its prompt text was" in refused.err
    chat.write_text(kept)
    assert "--chat True, not False" in rlvr("grpo", "--resume", "g", "--no-chat", status=1).err
    rlvr("grpo", "--resume", "g")
    check_prompts(run, QWEN, place / "qwen")
    check_replay(run)
    assert (run / "model/chat_template.jinja").read_text() == kept
    shutil.rmtree(place / "qwen")
    assert repr(QWEN) in rlvr(*EVAL, "--model", run / "model", "--chat", "--dry-run").err


@pytest.mark.slow
def test_ei_trains_on_what_it_sends(place, rlvr):
    rlvr(*EI, "--model", "llama", "--chat", "--run", "ei")
    check_prompts(place / "runs/ei", LLAMA, place / "llama")
    check_replay(place / "runs/ei")


@pytest.mark.slow
def test_a_prompt_that_just_fits_is_sampled_from(place, rlvr):
    room = (
        256
        - 8
        - len(load_tokenizer(place / "llama")(LLAMA.replace("{question}", ""), add_special_tokens=False).input_ids)
    )
    (place / "d.jsonl").write_text(json.dumps({"question": "x" * room, "answer": "1"}) + "\n")
    arguments = [*EI, "--model", "llama", "--chat", "--n-ei-steps", 1, "--ei-batch-size", 1]
    rlvr(*arguments, "--run", "fits")
    assert {row["num_prompt_tokens"] for row in read_rollouts(place / "runs/fits").to_pylist()} == {248}
    assert "the context holds 256" in rlvr(*arguments, "--sampling-max-tokens", 9, status=1).err


def test_sft_puts_questions_into_the_chat_template(place, rlvr):
    arguments = [*SFT, "--model", "llama", "--chat"]
    assert f"chat template: {LLAMA!r}" in rlvr(*arguments, "--run", "s").err
    check_prompts(place / "runs/s", LLAMA, place / "llama")  # of its evaluations
    check_replay(place / "runs/s")
    traces = load_traces(str(place / "t.jsonl"), PromptTemplate("question_only", LLAMA)).examples
    assert traces[1].response is not None
    assert traces[1].response.startswith("2 it is.")  # no space: the prompt ends in a line break
    tokenizer = load_tokenizer(place / "llama")
    prompts, _, _ = encode_traces(traces, {}, tokenizer, append_eos=True)
    asked = {row["prompt"]: row["prompt_ids"] for row in read_rollouts(place / "runs/s").to_pylist()}
    assert asked
    assert asked.items() <= {e.prompt: list(ids) for e, ids in zip(traces, prompts, strict=True)}.items()
    rlvr(*SFT, "--model", "llama", "--run", "plain")
    chat, plain = (read_stored(place / "runs" / run).logged[0]["loss/objective"] for run in ("s", "plain"))
    assert chat != plain


@pytest.mark.parametrize(("command", "config"), [(sft, SftConfig), (dpo, DpoConfig)], ids=["sft", "dpo"])
def test_responses_end_as_a_turn_of_the_chat_template_does(tmp_path, command, config):
    """Not with EOS, where the model's responses end so, too. Runs of earlier versions go on with EOS."""
    model, weights = write_chat_model(tmp_path / "phi3", "phi3"), []
    end_id = load_tokenizer(model).convert_tokens_to_ids("<|end|>")
    given = {"model": str(model), "chat": True, "prompt": "question_only", "runs_dir": str(tmp_path)}
    given |= {"dataset": str(tmp_path / "t.jsonl"), "eval_dataset": "", "train_batch_size": 1}
    for end, name in (("", "appended"), ("<|end|>", "written")):
        texts = {"response": "2", "chosen": "2", "rejected": "33"}
        row = {"question": "1 + 1?"} | {field: text + end for field, text in texts.items()}
        (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
        command.run(config(**given, append_eos=not end, run=name))
        run = tmp_path / name
        weights.append((run / "model" / "model.safetensors").read_bytes())
        assert fact_of(read_metadata(run), "dataset", "end_of_turn") == (None if end else end_id)
        if command is sft:
            check_replay(run)
    assert weights[0] == weights[1]
    with RunDir.create(tmp_path, "sft", name="before", metadata={"facts": {"dataset": {}}}):
        pass
    assert [end_of_turn(config(**given, resume=run)) for run in ("", "appended", "before")] == [end_id, end_id, None]
    assert end_of_turn(config(**given | {"chat": False})) is None


@pytest.mark.slow
@pytest.mark.parametrize("chat", [["--chat"], []], ids=["chat", "plain"])
def test_sft_on_a_runs_rollouts_trains_on_the_sampled_tokens(place, rlvr, chat):
    rlvr(*EVAL, "--model", "llama", *chat, "--run", "e", "--num-samples", 4)
    done = rlvr(*SFT, "--dataset", "e", "--model", "llama", *chat, "--run", "s")
    assert "of their own" not in done.err
    check_replay(place / "runs/s")
    tokenizer = load_tokenizer(place / "llama")
    traces = load_traces(str(place / "runs/e"), PromptTemplate("question_only", "{question}"))
    encoded = encode_traces(traces.examples, traces.token_ids, tokenizer, append_eos=False)
    prompts, responses = ([*map(list, ids)] for ids in encoded[:2])
    assert prompts == [traces.token_ids[e.id].prompt for e in traces.examples]
    assert responses == [traces.token_ids[e.id].response for e in traces.examples]
    texts = [e.response or "" for e in traces.examples]
    assert responses != tokenizer(texts, add_special_tokens=False).input_ids


@pytest.mark.slow
def test_what_filter_keeps_of_a_chat_run_is_taken_up_again(place, rlvr):
    options = ["--chat", "--chat-thinking", "off", "--chat-system", "Be brief."]
    rlvr(*EVAL, "--model", "qwen", *options, "--run", "e", "--num-samples", 4)
    kept = rlvr("filter", "e", "--phase", "eval", "--out", "kept.jsonl")
    assert kept.err.endswith("--prompt question_only --chat --chat-thinking off --chat-system 'Be brief.'\n")
    done = rlvr(*SFT, "--dataset", "kept.jsonl", "--model", "qwen", *options, "--run", "s")
    assert "of their own" not in done.err  # its questions, read back from its prompts, give these again
    rlvr("filter", "e", "--phase", "eval", "--emit", "questions", "--out", "q.jsonl")
    found = {json.loads(line)["question"] for line in (place / "q.jsonl").read_text().splitlines()}
    assert found == {f"What is {i} + {i}?" for i in range(4)}


def test_prompts_that_are_formatted_already_stay_as_they_are(place, rlvr):
    rows = [{"prompt": f"Q{i}", "response": f" {i}", "ground_truth": str(i)} for i in range(4)]
    (place / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [*SFT, "--model", "qwen", "--chat", "--eval-dataset", "arithmetic:4", "--dry-run"]
    assert "4 traces have a prompt of their own" in rlvr(*arguments).err
    assert "of their own" not in rlvr(*arguments, "--question-field", "prompt").err


def test_models_that_cannot_chat_are_refused_before_anything_is_sampled(place, rlvr):
    assert "has no chat template" in rlvr(*EVAL, "--chat", status=1).err
    write_byte_level_llama(place / "odd", chat_template="{{ raise_exception('no chat today') }}")
    for arguments in (EVAL, GRPO, EI, SFT):
        refused = rlvr(*arguments, "--model", "odd", "--chat", status=1)
        assert "TemplateError: no chat today" in refused.err
    refused = rlvr(*EVAL, "--model", "llama", "--chat", "--chat-thinking", "off", status=1)
    assert "has no switch for thinking" in refused.err
    assert not (place / "runs").exists()
