"""Episodes with chat models through the commands: what is stored, trained on, replayed, resumed, graded again and refused."""

import json
import re
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from chat_models import write_chat_model
from checks import findings
from killed import metrics_of
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.commands import sft
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.data.prompts import load_prompt
from rlvr_cli.data.traces import load_traces
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import model_path
from rlvr_cli.models.pretrained import load_tokenizer
from rlvr_cli.replay.run import replay_run
from rlvr_cli.replay.stored import StoredRun, read_stored, traces_of
from rlvr_cli.runs.readers import read_rollouts, read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.samplers.episodes.turns import chat_turns
from rlvr_cli.training.traces import encode_traces
from vllm_server import vllm_servers

MINE = """
from rlvr_cli.environments import Reply

class Again:
    def begin(self, example, seed):
        return [{"role": "user", "content": "Say <|im_end|> " + example.question}]

    def answer(self, turn):
        return Reply("Again <|im_end|>?")

def hears(response, truth):
    return float("Again" in response or "error" in response)

def length(response, truth):
    return float(len(response) % 2)
"""
COMMON = [
    "--dataset",
    "arithmetic:16",
    "--prompt",
    "question_only",
    "--chat",
    "--grader",
    "mine.py:length",
    "--grader-workers",
    1,
]
COMMON += ["--environment-workers", 1, "--sampling-max-tokens", 24, "--sampling-min-tokens", 0, "--max-turns", 3]
COMMON += ["--max-episode-tokens", 400]
GRPO = [
    "--n-grpo-steps",
    2,
    "--rollout-batch-size",
    8,
    "--group-size",
    4,
    "--train-batch-size",
    8,
    "--eval-examples",
    2,
]
GRPO += ["--gradient-accumulation-steps", 2, "--learning-rate", 1e-4, "--checkpoint-every", 1]
LIKELY = ("<tool_call>", "</tool_call>", "<|im_end|>", "{", "}")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    (folder / "mine.py").write_text(MINE)
    write_chat_model(folder / "qwen3", "qwen3", likely=LIKELY)
    return folder


@pytest.fixture(scope="module")
def rlvr(place, forks):
    return lambda *arguments, status=0, **more: forks.run(*arguments, cwd=place, status=status, **more)


@pytest.fixture(scope="module")
def trained(place, rlvr) -> Path:
    longer = ["--max-episode-tokens", 100_000]  # than the context, which ends an episode
    done = rlvr("grpo", "--model", "qwen3", *COMMON, *longer, *GRPO, "--environment", "calculator", "--run", "g")
    assert "note: in the chat template, the next turn is the difference of two renderings\n" in done.err
    return place / "runs/g"


def rows_of(run: Path) -> list[dict]:
    """By their keys: those of an evaluation are stored in the order in which their episodes ended."""
    rows = read_rollouts(run).to_pylist()
    assert rows
    return sorted(rows, key=lambda row: [row[name] for name in ("phase", "step", "example_id", "sample_index")])


def test_training_is_on_the_policys_tokens_and_replays(place, trained, rlvr, monkeypatch):
    monkeypatch.chdir(place)
    assert findings(trained) == []
    assert replay_run(read_stored(trained), most=None).problems == []
    tokenizer = load_tokenizer(place / "qwen3")
    rows = [row for row in rows_of(trained) if row["turns"]]
    assert len(rows) > 4
    assert sum(row["episode"]["tool_errors"] for row in rows) > 4
    begins = "<|im_start|>user\n<tool_response>\nerror: "
    for row in rows:
        assert '<tools>\n{"type": "function", "function": {"name": "calc"' in row["prompt"]
        said = [tokenizer.decode(row["response_ids"][turn["start"] : turn["end"]]) for turn in row["turns"]]
        for turn, text in zip(row["turns"], said, strict=True):
            assert turn["role"] == "policy" or not text or "<|im_start|>" not in text or "<tool_response>" in text
        heard = "".join(text for turn, text in zip(row["turns"], said, strict=True) if turn["role"] != "policy")
        assert begins in heard or row["finish_reason"] == "length"
        for logprob, own in zip(row["sampled_logprobs"], row["response_mask"], strict=True):
            assert logprob == 0.0 or own


def test_a_file_of_them_trains_as_the_run(place, trained, rlvr):
    """The template's tokens, too, which are not in the texts of turns."""
    rlvr("filter", trained, "--out", "episodes.jsonl", "--where", "episode.ended_by = 'policy'")
    of_run, of_file = (
        load_traces(str(source), load_prompt("question_only")) for source in (trained, place / "episodes.jsonl")
    )
    tokenizer = load_tokenizer(place / "qwen3")
    encoded = []
    for traces in (of_run, of_file):
        ids = encode_traces(traces.examples, traces.token_ids, tokenizer, append_eos=False)
        encoded.append({e.response: row for e, *row in zip(traces.examples, *ids, strict=True) if row[2]})
    assert encoded[1]
    assert encoded[1].items() <= encoded[0].items()
    other = load_tokenizer(model_path(""))
    with pytest.raises(RlvrError, match="its token ids do not spell its text with this tokenizer"):
        encode_traces(of_file.examples, of_file.token_ids, other, append_eos=False)
    done = rlvr(
        "sft", "--dataset", "episodes.jsonl", "--model", "qwen3", "--chat", "--prompt", "question_only", "--dry-run"
    )
    plain = len(of_file.examples) - len(of_file.token_ids)
    assert f"note: {plain} traces have a prompt of their own, which --chat leaves as it is" in done.err


@pytest.mark.slow
def test_turns_are_sampled_at_an_endpoint_after_the_ids_that_it_gave(place, rlvr):
    """What is asked for a turn ends with the tokens of the turns before; the answers of tools stand between them as the template has them."""
    model = place / "qwen3"
    given = [*COMMON, "--environment", "calculator", "--limit", 4, "--run", "at-endpoint"]
    with vllm_servers(model, 1) as (server,):
        rlvr("eval", "--model", model, "--base-url", f"{server.url}/v1", *given)
    run, tokenizer = place / "runs/at-endpoint", load_tokenizer(model)
    assert findings(run) == []
    assert read_run(run).metadata["sampler"]["engine"] == "openai"
    rows = rows_of(run)
    assert any(row["episode"]["tool_errors"] for row in rows)
    turns = [(row, turn) for row in rows for turn in row["turns"] or ()]
    bodies = [body for body in server.endpoint.bodies if body]  # without the question which models there are
    asked = {tuple(body["prompt"]) for body in bodies if not isinstance(body["prompt"], str)}
    assert asked >= {
        (*row["prompt_ids"], *row["response_ids"][: turn["start"]]) for row, turn in turns if turn["role"] == "policy"
    }
    answers = [
        tokenizer.decode(row["response_ids"][t["start"] : t["end"]]) for row, t in turns if t["role"] != "policy"
    ]
    assert any("<|im_start|>user\n<tool_response>\nerror: " in answer for answer in answers)


@pytest.mark.slow
def test_a_resumed_run_is_the_one_that_was_not_interrupted(place, trained, rlvr):
    arguments = ["grpo", "--model", "qwen3", *COMMON, *GRPO, "--environment", "calculator", "--run", "cut"]
    rlvr(*arguments, fault="update:2", status=-signal.SIGKILL)
    rlvr("grpo", "--resume", "cut")
    rlvr("check", "cut", "--replay", "all")
    own = [[row["response_ids"] for row in rows_of(place / "runs" / run)] for run in ("g", "cut")]
    assert own[0] == own[1]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ei", "ppo", "distill", "dpo"])
def test_every_command_that_samples_plays_them(place, rlvr, monkeypatch, command):
    monkeypatch.chdir(place)
    step = ["--rollout-batch-size", 8, "--train-batch-size", 8, f"--n-{command}-steps", 1]
    options = {
        "ei": ["--ei-batch-size", 2, "--group-size", 4, "--n-ei-steps", 1, "--train-batch-size", 4],
        "ppo": [*step, "--micro-batch-size", 8],
        "distill": [*step[:2], *step[4:], "--teacher", "qwen3"],
        "dpo": [*step[:4], "--group-size", 4, "--n-dpo-steps", 1],
    }[command]
    given = [*COMMON, *options, "--eval-examples", 2, "--learning-rate", 1e-4, "--environment", "calculator"]
    rlvr(command, "--model", "qwen3", *given, "--run", command)
    run = place / "runs" / command
    assert findings(run) == []
    assert any(row["episode"]["tool_errors"] for row in rows_of(run))
    if command in ("ei", "distill"):  # the replay knows no critic and no pairs
        assert replay_run(read_stored(run), most=None).problems == []


@pytest.mark.slow
@pytest.mark.parametrize("apart", ["--samplers 2", "--async-steps 1"])
def test_sampling_processes_play_them_too_and_how_is_said_once(place, rlvr, apart):
    name = apart.partition(" ")[0].strip("-")
    arguments = ["grpo", "--model", "qwen3", *COMMON, *GRPO, "--environment", "calculator", "--run", name]
    done = rlvr(*arguments, *apart.split())
    assert done.err.count("note: in the chat template, the next turn is") == 1
    assert findings(place / "runs" / name) == []
    assert sum(row["episode"]["tool_errors"] for row in rows_of(place / "runs" / name)) > 4


def test_an_environment_of_ones_own_answers_as_the_user(place, rlvr):
    rlvr("eval", "--model", "qwen3", *COMMON, "--environment", "mine.py:Again", "--limit", 3, "--run", "e")
    run = place / "runs/e"
    assert findings(run) == []
    tokenizer, rows = load_tokenizer(place / "qwen3"), rows_of(run)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert {len(row["turns"] or ()) for row in rows} != {0}
    for row in rows:
        assert row["prompt"].startswith("<|im_start|>user\nSay <|im_end|> What is")
        assert row["prompt_ids"].count(end) == 1
        graded = row["response"][row["episode"]["graded_from"] : row["episode"]["graded_to"]]
        assert row["reward"] == len(graded) % 2
        assert "Again" not in graded
        for role, start, end_of_turn in ((t["role"], t["start"], t["end"]) for t in row["turns"] or ()):
            ids = row["response_ids"][start:end_of_turn]
            assert role == "policy" or ids.count(end) <= 1
    rlvr("grade", "e", "--grader", "mine.py:hears", "--grader-workers", 1)
    with open_runs([read_run(run)]) as database:
        assert database.select("SELECT count(*), sum(reward) FROM grades").rows == [(3, 0.0)]
    assert read_run(run).metadata["facts"]["environment"]["name"] == "mine.py:Again"


def test_switches_reach_what_follows_a_turn(place):
    """As they reach the prompt; and any end of the model's responses ends a turn."""
    write_chat_model(place / "ends", "qwen3")
    tokenizer = load_tokenizer(place / "ends")
    given = {"model": str(place / "ends"), "environment": f"{place}/mine.py:Again", "chat": True}
    turns = chat_turns(EvalConfig(**given, chat_thinking="off", chat_system="Be brief."))
    text, prompt = turns.prompt([{"role": "user", "content": "1"}])
    assert (
        text
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    (following,) = turns.after(prompt, [other], [{"role": "user", "content": "2"}])
    assert (
        tokenizer.decode(following) == "\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_what_a_model_cannot_do_is_said_before_anything_is_sampled(place, rlvr):
    write_chat_model(place / "gemma3", "gemma3")
    arguments = ["eval", "--model", "gemma3", *COMMON, "--environment", "calculator", "--dry-run"]
    assert "knows no tools: with and without them it writes the same" in rlvr(*arguments, status=1).err
    write_chat_model(place / "base", "qwen2_5")
    (place / "base/generation_config.json").write_text('{"eos_token_id": 0}')
    tokenizer = json.loads((place / "base/tokenizer_config.json").read_text())
    (place / "base/tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": "<|endoftext|>"}))
    arguments = ["eval", "--model", "base", *COMMON, "--environment", "mine.py:Again", "--run", "never"]
    assert (
        "does not end an assistant's turn with a token that ends the model's responses"
        in rlvr(*arguments, status=1).err
    )
    arguments = ["eval", "--model", "qwen3", *COMMON, "--tool", "mine.py:length", "--run", "never"]
    assert "The tool length cannot be described to a chat model" in rlvr(*arguments, status=1).err
    raw = [option for option in COMMON if option != "--chat"]
    arguments = ["eval", "--model", "qwen3", *raw, "--environment", "mine.py:Again", "--limit", 1, "--run", "raw"]
    assert "begins with messages, and the prompt is raw text" in rlvr(*arguments, status=1).err
    assert not (place / "runs/never").exists()


def trace(**more):
    call = {"id": "1", "type": "function", "function": {"name": "calc", "arguments": '{"expression": "1+1"}'}}
    return {
        "messages": [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
            {"role": "assistant", "content": "It is 2."},
        ]
    } | more  # fmt: skip


def test_conversations_train_on_the_assistants_tokens_alone_and_replay(place, rlvr, monkeypatch):
    rows = [trace(), trace(tools=[]), trace(messages=[*trace()["messages"][:3], {"role": "assistant", "content": "2"}])]
    (place / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::2]))
    arguments = [
        "sft",
        "--dataset",
        "t.jsonl",
        "--model",
        "qwen3",
        "--chat",
        "--train-batch-size",
        2,
        "--sft-epochs",
        1,
    ]
    arguments += ["--micro-batch-size", 2, "--learning-rate", 1e-4, "--prompt", "question_only"]
    rlvr(*arguments, "--environment", "calculator", "--eval-dataset", "arithmetic:1", "--eval-examples", 1, "--run", "s",
         "--sampling-max-tokens", 8, "--grader", "mine.py:length")  # fmt: skip
    tokenizer = load_tokenizer(place / "qwen3")
    call = '<tool_call>\n{"name": "calc", "arguments": {"expression": "1+1"}}\n</tool_call><|im_end|>'
    nothing = "<think>\n\n</think>\n\n"  # as the chat template writes a last turn without thinking
    own = [nothing, call, nothing, "It is 2.<|im_end|>", nothing, call, nothing, "2<|im_end|>"]
    expected = sum(len(tokenizer(text, add_special_tokens=False).input_ids) for text in own)
    assert metrics_of(place / "runs/s")["train", 0, "update/tokens"] == expected
    raw = [option for option in arguments if option != "--chat"]
    assert "holds conversations (messages), and the prompt is raw text" in rlvr(*raw, "--run", "unmade", status=1).err
    monkeypatch.chdir(place)
    stored = read_stored(place / "runs/s")
    assert replay_run(stored, most=None).problems == []
    own = replace(stored, options=stored.options | {"environment": "", "tool": ("mine.py:length",)})
    with pytest.raises(
        RlvrError,
        match=r"cannot be replayed: its tools, mine\.py:length, are described by code that a check does not run",
    ):
        replay_run(own, most=None)


def test_conversations_with_other_messages_or_tools_are_other_traces(place, tmp_path, capsys):
    """Runs of earlier versions, which told them apart by their text, go on so."""
    said = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    system = {"role": "system", "content": "Be brief."}
    rows = [{"messages": said}, {"messages": [system, *said]}, {"messages": said, "tools": []}, {"messages": said}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, began in (
        ("before", {}),
        ("between", {"told_apart_by": "messages"}),
        ("after", {"told_apart_by": "turns"}),
    ):
        with RunDir.create(tmp_path, "sft", name=name, metadata={"facts": {"dataset": began}}):
            pass
    template = load_prompt("question_only")
    own = {"dataset": str(tmp_path / "t.jsonl"), "model": str(place / "qwen3"), "chat": True}
    fingerprints = []
    for resume, count in (("", 3), ("after", 3), ("between", 3), ("before", 1)):
        config = SftConfig(**own, resume=resume, runs_dir=str(tmp_path))
        traces, examples = sft.read_traces(config, template)
        assert ("began with an earlier version" in capsys.readouterr().err) == (resume in ("between", "before"))
        facts = {"prompt": {"name": template.name, "text": template.text}}
        facts["dataset"] = sft.recorded(config, traces, examples, [])
        assert len(examples) == count
        assert traces_of(StoredRun(tmp_path, "sft", asdict(config), "auto", facts, [], {}))[1] == examples
        fingerprints.append(traces.fingerprint)
    first, same, text, older = fingerprints
    assert first == same != text == older, "earlier versions knew that of the text alone"
    assert facts["dataset"].keys() == {"name", "rows", "fingerprint"}


def test_the_last_turn_alone_decides_whether_a_conversation_is_correct(place, tmp_path):
    turns = ("1+1?", r"\boxed{2}", "Sure?", "dunno"), ("1+1?", "dunno", "Sure?", r"\boxed{2}")
    rows = [
        {
            "messages": [
                {"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, said, strict=True)
            ]
        }
        for said in turns
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({**row, "answer": "2"}) + "\n" for row in rows))
    own = {"dataset": str(tmp_path / "t.jsonl"), "model": str(place / "qwen3"), "chat": True, "prompt": "question_only"}
    config, template = SftConfig(**own, correct_only=True, grader="question_only"), load_prompt("question_only")
    traces, examples = sft.read_traces(config, template)
    assert [example.conversation.messages[-1]["content"] for example in examples] == [r"\boxed{2}"]
    facts = {"prompt": {"name": template.name, "text": template.text}}
    facts["dataset"] = sft.recorded(config, traces, examples, [])
    assert traces_of(StoredRun(tmp_path, "sft", asdict(config), "auto", facts, [], {}))[1] == examples


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": "hi"}, "its messages are not a list of {role, content}."),
        ({"messages": ["hi"]}, "content}: message 1 has no role."),
        (
            {"messages": [{"role": "user", "content": 1}]},
            "content}: message 1 has other content, or calls that are none.",
        ),
        (
            trace(messages=[{"role": "user", "content": [{"type": "image"}]}]),
            "the content of message 1 has parts that are no texts.",
        ),
        (
            {"messages": [{"role": "system", "content": "x"}, {"role": "developer", "content": "x"}]},
            "the role of message 2 is developer, and not system, user, assistant, tool.",
        ),
        (trace(messages=trace()["messages"][:3]), "its messages do not go from the user to the assistant"),
        (trace(messages=trace()["messages"][1:]), "its messages do not go from the user to the assistant"),
        (trace(messages=[*trace()["messages"], {"role": "assistant", "content": "x"}]), "a turn of its assistant"),
        (trace(tools="calc"), "its tools are not a list of JSON schemas"),
    ],
)
def test_a_conversation_that_is_none_is_refused(tmp_path, row, problem):
    (tmp_path / "bad.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(RlvrError, match=re.escape(problem)):
        load_traces(str(tmp_path / "bad.jsonl"), load_prompt("question_only"))


def test_a_conversation_is_read_as_it_is_written(tmp_path):
    call = {"type": "function", "function": {"name": "calc", "arguments": {"x": 2, "y": 2.5, "z": "2"}}}
    messages = [trace()["messages"][0], {"role": "assistant", "tool_calls": [call]}, *trace()["messages"][2:]]
    other = [*messages[:-1], {"role": "assistant", "content": "No."}]
    parts = [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?", "image_url": None}]
    messages[0] |= {"content": parts}
    rows = [trace(messages=messages, ground_truth="2"), trace(), trace(messages=other)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    traces = load_traces(str(tmp_path / "t.jsonl"), load_prompt("question_only"))
    first, second, third = traces.examples  # they differ in a call, or in the last turn
    assert first.conversation.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert second.conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == {"expression": "1+1"}
    assert (first.question, first.ground_truth, first.conversation.tools) == ("1 + 1?", "2", None)
    assert [traces.graded[e.id] for e in traces.examples] == ["It is 2.", "It is 2.", "No."]
    assert third.prompt == load_prompt("question_only").fill("1 + 1?")


def test_lone_surrogates_in_conversations_and_turns_become_text_that_can_be_tokenized(tmp_path):
    half = "half \ud83d"
    messages = trace()["messages"]
    messages[0]["content"] = messages[3]["content"] = half
    messages[1]["tool_calls"][0]["function"]["arguments"] = json.dumps({half: [half]})
    tool = {"type": "function", "function": {"name": "calc", "description": half, "parameters": {"type": "object"}}}
    turns = [{"role": role, "text": half} for role in ("policy", "environment", "policy")]
    rows = [{"messages": messages, "tools": [tool]}, {"prompt": half, "turns": turns}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said, played = load_traces(str(tmp_path / "t.jsonl"), load_prompt("question_only")).examples
    text = "half \\ud83d"
    assert (said.question, said.conversation.messages[3]["content"]) == (text, text)
    assert said.conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == {text: [text]}
    assert said.conversation.tools[0]["function"]["description"] == text
    assert (played.turns, played.response) == (tuple((turn["role"], text) for turn in turns), text * 3)
