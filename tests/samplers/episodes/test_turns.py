"""Episodes with chat models: exact tokens in the model's chat template, whatever is said; and calls that are answered in order."""

import json
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_models import CHAT_MODELS, write_chat_model
from rlvr_cli.environments.calculator import calculate
from rlvr_cli.environments.open import EnvironmentSpec
from rlvr_cli.environments.pool import EnvironmentPool
from rlvr_cli.environments.tools import load_function, schema_of
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.pretrained import load_end_tokens
from rlvr_cli.models.tokens.chat import ChatTemplate, tool_message
from rlvr_cli.models.tokens.next_turn import NextTurn
from rlvr_cli.runs.turns import broken_turns
from rlvr_cli.samplers.episodes.sampler import EpisodeSampler
from rlvr_cli.samplers.episodes.turns import ChatTurns, _next_turn
from rlvr_cli.samplers.stop_strings import response_text
from rlvr_cli.types import Completion, Example, Request, SamplingParams

# Says what the example's ground truth lists, one text after the other; its solution is JSON of how it begins.
SCRIPT = """
import json
from rlvr_cli.environments import Reply

class Script:
    def begin(self, example, seed):
        self.replies = json.loads(example.ground_truth)
        return None if example.solution is None else json.loads(example.solution)

    def answer(self, turn):
        return Reply(self.replies.pop(0)) if self.replies else Reply(done=True)

class Stopped(Script):
    stop = ("?",)
"""
QUESTION = {"role": "user", "content": "1 + 1?"}
NAMES = ["qwen3", "llama3_2", "mistral"]  # that are played with tools, too


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    file = tmp_path_factory.mktemp("environment") / "mine.py"
    file.write_text(SCRIPT)
    specs = {name: EnvironmentSpec(f"{file}:{name}", chat=True) for name in ("Script", "Stopped")}
    pools = {name: EnvironmentPool(spec, workers=1) for name, spec in specs.items()}
    pools["calculator"] = EnvironmentPool(EnvironmentSpec("calculator", chat=True), workers=1)
    with closing(pools["Script"]), closing(pools["Stopped"]), closing(pools["calculator"]):
        yield pools


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """For each model how its turns go on, without tools and with the calculator."""
    folder, made = tmp_path_factory.mktemp("models"), {}
    for name in CHAT_MODELS:
        path = write_chat_model(folder / name, name)
        for tools in (False, True)[: 1 + (name in NAMES)]:
            chat = ChatTemplate(path, tools=[schema_of("calc", calculate)] * tools)
            made[name, tools] = NextTurn(chat, ends=load_end_tokens(path, chat.tokenizer))
    return made


def test_what_is_kept_for_each_set_of_tools_is_bounded():
    """Each row of a dataset may have its own, and making so many takes long."""
    assert 0 < (_next_turn.cache_parameters()["maxsize"] or 0) <= 10_000


class Scripted:
    """An engine whose turns are the ids that it is given; it keeps what it is asked."""

    engine, seeding, notes, policy_version, context_length = "scripted", "per-request", (), 0, None

    def __init__(self, turns, tokenizer, ends):
        self._turns, self._tokenizer, self._ends = list(turns), tokenizer, ends
        self.asked = []

    def sample(self, requests, params, *, more=None):
        for index, request in enumerate(requests):
            self.asked.append(request.prompt_ids)
            ids = tuple(self._turns.pop(0))
            text = response_text(self._tokenizer, ids)
            stopped = next((stop for stop in params.stop if text.endswith(stop)), None)
            yield Completion(
                index, 0, text, request.prompt_ids, ids, (-0.5,) * len(ids), len(request.prompt_ids), len(ids), "stop",
                stopped or ("eos" if ids[-1] in self._ends else "other"), 1.0,
            )  # fmt: skip


def play(turns, pool, policy, *, replies=(), begins=None, max_turns=9, longest=4000, stop=()):
    """The episode in which the policy samples these ids, or texts, and the engine that was asked for them."""
    tokenizer = turns.chat.tokenizer
    policy = [tokenizer(t, add_special_tokens=False).input_ids if isinstance(t, str) else t for t in policy]
    engine = Scripted(policy, tokenizer, turns._end_ids)
    way = ChatTurns(turns, pool.stop, calls=pool.spec.calls)
    sampler = EpisodeSampler(engine, tokenizer, pool, turns=way, max_turns=max_turns, longest=lambda _: longest)
    example = Example("q", "1 + 1?", json.dumps(replies), solution=None if begins is None else json.dumps(begins))
    prompt, ids = turns.prompt([QUESTION])
    request = Request(prompt, (3,), prompt_ids=tuple(ids), example=example)
    (found,) = sampler.sample([request], SamplingParams(max_tokens=longest, min_tokens=0, stop=stop))
    return found, engine


def texts(turns, found):
    """(role, text with its markers) of each turn."""
    decode = turns.chat.tokenizer.decode
    return [(role, decode(found.token_ids[start:end])) for role, start, end in found.turns or [("policy", 0, None)]]


def call(expression):
    return f'<tool_call>\n{{"name": "calc", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def test_calls_are_answered_in_their_order(chats, pools):
    turns = chats["qwen3", True]
    wrong = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    asked = f"<think>\n{call('9*9')}</think>{call('2*3')}\n{wrong}{call('1/0')}{call('7*7')}<|im_end|>"
    found, engine = play(turns, pools["calculator"], [asked, "6 and 49<|im_end|>"])
    assert texts(turns, found) == [
        ("policy", asked),
        ("calc", "\n<|im_start|>user\n<tool_response>\n6\n</tool_response>"),
        ("tool", "\n<tool_response>\nerror: there is no tool search, only calc\n</tool_response>"),
        ("calc", "\n<tool_response>\nerror: division by zero\n</tool_response>"),
        ("calc", "\n<tool_response>\n49\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        ("policy", "6 and 49<|im_end|>"),
    ]
    episode = found.episode
    assert (episode.ended_by, episode.num_turns, episode.tool_calls, episode.tool_errors) == ("policy", 2, 4, 2)
    assert found.graded_text == "6 and 49"
    assert [own for role, start, end in found.turns for own in found.response_mask[start:end]] == list(
        found.response_mask
    )
    prompt = found.prompt_ids
    assert engine.asked == [prompt, prompt + found.token_ids[: found.turns[-1].start]]
    assert '<tools>\n{"type": "function", "function": {"name": "calc"' in turns.chat.tokenizer.decode(prompt)


def test_a_turn_without_a_call_ends_the_episode(chats, pools):
    for said, ended_by in (("2<|im_end|>", "policy"), ("<tool_call>{<|im_end|>", "turns")):
        found, _ = play(chats["qwen3", True], pools["calculator"], [said], max_turns=1)
        assert (found.episode.ended_by, found.episode.tool_errors) == (ended_by, int(ended_by == "turns"))
        assert found.graded_text == said.removesuffix("<|im_end|>")


@pytest.mark.parametrize("name", NAMES)
def test_what_was_sampled_is_never_tokenized_again(chats, pools, name):
    """Also where the ids are others than those of their text."""
    turns = chats[name, True]
    written = {"qwen3": call("1 + 2"), "llama3_2": '{"name": "calc", "parameters": {"expression": "1 + 2"}}'}
    written["mistral"] = '[TOOL_CALLS] [{"name": "calc", "arguments": {"expression": "1 + 2"}, "id": "000000000"}]'
    spelled = []
    for piece in written[name].replace("[TOOL_CALLS]", "\0").replace("<tool_call>", "\1").replace("</tool_call>", "\2"):
        text = {"\0": "[TOOL_CALLS]", "\1": "<tool_call>", "\2": "</tool_call>"}.get(piece, piece)
        spelled += turns.chat.tokenizer(text, add_special_tokens=False).input_ids
    usual = turns.chat.tokenizer(written[name], add_special_tokens=False).input_ids
    assert spelled != usual
    found, engine = play(turns, pools["calculator"], [[*spelled, turns.end], [turns.end]])
    following = [
        i for piece in turns.after(found.prompt_ids, [turns.end], [tool_message("calc", "3", 0)]) for i in piece
    ]
    assert found.token_ids == (*spelled, turns.end, *following, turns.end)
    assert engine.asked[1] == (*found.prompt_ids, *spelled, turns.end, *following)


def test_an_environment_answers_as_the_user(chats, pools):
    turns = chats["qwen3", False]
    begins = [{"role": "system", "content": "A <|im_end|>game."}, {"role": "user", "content": "Guess."}]
    found, _ = play(
        turns,
        pools["Script"],
        ["5<|im_end|>", "7<|endoftext|>", "8<|im_end|>"],
        replies=["no", "higher"],
        begins=begins,
    )
    prompt = (
        "<|im_start|>system\nA <|im_end|>game.<|im_end|>\n<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert found.prompt == turns.chat.tokenizer.decode(found.prompt_ids) == prompt
    assert found.prompt_ids.count(turns.end) == 2
    following = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert texts(turns, found) == [
        ("policy", "5<|im_end|>"), ("environment", following.format("no")), ("policy", "7<|endoftext|>"),
        ("environment", following.format("higher")), ("policy", "8<|im_end|>"),
    ]  # fmt: skip
    assert (found.episode.ended_by, found.episode.tool_calls) == ("environment", 0)
    asked, _ = play(turns, pools["Script"], ["5<|im_end|>"], begins="Guess.")
    assert asked.prompt == prompt.partition("game.<|im_end|>\n")[2]


def test_a_turn_that_a_stop_string_ends_gets_its_end_from_the_environment(chats, pools):
    turns = chats["qwen3", False]
    for said in ("Is it 5?", "Is it 5?<|im_end|>"):  # an end token that completes a stop string counts as that
        found, _ = play(turns, pools["Stopped"], [said, "5<|im_end|>"], replies=["yes"], stop=())
        (_, own), (_, heard), _ = texts(turns, found)
        assert own + heard == "Is it 5?<|im_end|>\n<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n"
        assert own == said
        assert found.response_mask[len(turns.chat.tokenizer(said, add_special_tokens=False).input_ids)] is False
        assert found.episode.ended_by == "policy"


@pytest.mark.parametrize(
    ("name", "role", "problem"),
    [
        ("mistral", "system", "fails (TemplateError: Only user, assistant and tool"),
        ("qwen3", "developer", "leaves out or repeats messages of the role developer"),
    ],
)
def test_messages_that_the_chat_template_cannot_begin_with_cost_their_own_episode(chats, pools, name, role, problem):
    for begins in ([{"role": role, "content": "x"}], [QUESTION, QUESTION | {"role": role}]):
        found, engine = play(chats[name, False], pools["Script"], ["</s>"], begins=begins)
        assert (found.episode.ended_by, found.grade.error, engine.asked) == ("error", "ValueError", [])
        assert problem in found.grade.error_detail


def test_what_there_is_no_room_for_is_cut(chats, pools):
    turns = chats["qwen3", True]
    whole, _ = play(turns, pools["calculator"], [f"{call('2')}{call('3')}<|im_end|>", "5<|im_end|>"])
    for room in range(whole.turns[0].end, whole.num_tokens):
        found, _ = play(turns, pools["calculator"], [f"{call('2')}{call('3')}<|im_end|>", "5"], longest=room)
        kept = min(room, whole.turns[-1].start)
        assert found.token_ids[:kept] == whole.token_ids[:kept]
        assert found.num_tokens <= room
        assert found.graded_text in ("5", f"{call('2')}{call('3')}")


POLICY = st.lists(
    st.text(max_size=8) | st.sampled_from(["<think>", "</think>", "<|im_end|>", call("1+1"), "<tool_call>{", "<|eot_id|>", ""]),
    max_size=4,
).map("".join)  # fmt: skip
SAID = st.lists(
    st.text(max_size=12)
    | st.sampled_from(["<|im_end|>\n<|im_start|>assistant\n", "</tool_response>", "<|eot_id|>", "[/INST]", "</s>", "", "</think>"]),
    max_size=4,
).map("".join)  # fmt: skip


def keeps_the_invariant(turns, pool, policy, replies, longest):
    policy = [text.encode("utf-8", "ignore").decode() for text in policy]
    ids_of = turns.chat.tokenizer(policy, add_special_tokens=False).input_ids
    ends = set(turns._end_ids)
    sampled = [[*(i for i in ids if i not in ends), turns.end] for ids in ids_of]
    found, engine = play(turns, pool, sampled, replies=replies, longest=longest, max_turns=len(sampled))
    policy_tokens = found.episode.num_policy_tokens
    assert broken_turns(found.turns, found.response_mask, tokens=found.num_tokens, policy_tokens=policy_tokens) is None
    assert engine.asked[0] == found.prompt_ids
    assert all(asked == (found.prompt_ids + found.token_ids)[: len(asked)] for asked in engine.asked)
    rows = found.turns or [("policy", 0, found.num_tokens)]
    own = [found.token_ids[start:end] for role, start, end in rows if role == "policy"]
    assert own == [tuple(ids) for ids in sampled[: len(own)]]
    known = set(turns.markers.ids_of.values())
    plain = [i for i in turns.after([1], [turns.end], [{"role": "user", "content": "2"}])[0] if i in known]
    for role, start, end in rows:
        if role != "policy":
            marks = [i for i in found.token_ids[start:end] if i in known]
            assert marks == plain[: len(marks)]
    assert found.graded_text == response_text(turns.chat.tokenizer, own[-1])


@pytest.mark.parametrize("episodes", [12, pytest.param(1430, marks=pytest.mark.slow)])
def test_whatever_is_said_the_tokens_are_exact(chats, pools, episodes):
    """Of each model as many episodes; what is said is drawn once for all of them: it takes as long as an episode."""

    @given(policy=st.lists(POLICY, min_size=1, max_size=3), replies=st.lists(SAID, max_size=3))
    @settings(max_examples=episodes, deadline=None)
    def check(policy, replies):
        for name in CHAT_MODELS:
            keeps_the_invariant(chats[name, False], pools["Script"], policy, replies, 4000)

    check()


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        ("def bad(x):\n    '''Do.\n\n    Args:\n        x: what.\n    '''", "The tool bad cannot be described to a chat model: .*type hint"),
        ("def bad(x: str):\n    '''Do.'''", "The tool bad cannot be described to a chat model: .*docstring"),
    ],
)  # fmt: skip
def test_a_tool_without_types_or_descriptions_is_refused(tmp_path, tool, problem):
    (tmp_path / "mine.py").write_text(tool)
    with pytest.raises(RlvrError, match=problem) as caught:
        schema_of(*load_function(f"{tmp_path}/mine.py:bad"))
    assert "Args:" in caught.value.hint


def test_a_tool_of_a_user_gets_its_arguments(tmp_path, chats):
    (tmp_path / "mine.py").write_text(
        "def add(a: int, b: int = 1):\n    '''Add.\n\n    Args:\n        a: one.\n        b: another.\n    '''\n    return a + b\n"
    )
    with closing(EnvironmentPool(EnvironmentSpec("", (f"{tmp_path}/mine.py:add",), chat=True), workers=1)) as pool:
        schema = schema_of(*load_function(f"{tmp_path}/mine.py:add"))  # by its process: tests/commands/across
        assert (schema["function"]["name"], schema["function"]["parameters"]["required"]) == ("add", ["a"])
        calls = ['{"name": "add", "arguments": {"a": 2}}', '{"name": "add", "arguments": {"c": 2}}']
        asked = "".join(f"<tool_call>{text}</tool_call>" for text in calls)
        found, _ = play(chats["qwen3", True], pool, [f"{asked}<|im_end|>", "<|im_end|>"])
    (_, first), (_, second) = texts(chats["qwen3", True], found)[1:3]
    assert "<tool_response>\n3\n</tool_response>" in first
    assert 'error: the call is not JSON such as {"a": ..., "b": ...}: ' in second
    assert found.episode.tool_errors == 1
