"""What follows a turn of a chat model: for each model's chat template the ids that it writes itself, or a reason why not."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_models import CHAT_MODELS, LLAMA_2_TEMPLATE, ZEPHYR_TEMPLATE, sentencepiece_tokenizer, write_chat_model
from marks import slow
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.pretrained import load_end_tokens, load_tokenizer
from rlvr_cli.models.tokens.chat import TODAY, ChatTemplate, tool_call, tool_message
from rlvr_cli.models.tokens.markers import Markers
from rlvr_cli.models.tokens.next_turn import NextTurn

SCHEMA = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Calculate.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Numbers."}},
            "required": ["expression"],
        },
    },
}
QUESTION = {"role": "user", "content": "1 + 1?"}
WITH_TOOLS = [name for name, model in CHAT_MODELS.items() if model.knows_tools]
DIFFERENCE = "the next turn is the difference of two renderings"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda name: write_chat_model(folder / name, name))


@pytest.fixture(scope="module")
def next_turn(made):
    @cache
    def make(name, *, tools=False, **chat):
        template = ChatTemplate(made(name), tools=[SCHEMA] * tools, **chat)
        return NextTurn(template, ends=load_end_tokens(made(name), template.tokenizer))

    return make


def of_transformers(turns, messages):
    """The ids that the chat template gives a whole conversation, up to the next answer."""
    values = {
        "tools": turns.chat.tools or None,
        "add_generation_prompt": True,
        "return_dict": False,
        "strftime_now": TODAY.strftime,
    }
    return turns.chat.tokenizer.apply_chat_template(messages, **values)


def ids_of(turns, text):
    return turns.chat.tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("name", CHAT_MODELS)
@pytest.mark.parametrize("answer", [slow("Go on."), "", slow("7.\n"), '"é"\n\n{数}'])
def test_a_conversation_is_that_of_the_chat_template(next_turn, name, answer):
    turns = next_turn(name)
    assert turns.way == DIFFERENCE
    question, answer = {"role": "user", "content": "1 + 1?"}, {"role": "user", "content": answer}
    _, prompt = turns.prompt([question])
    assert prompt == of_transformers(turns, [question])
    said = "It is 2." if name != "mistral" else " It is 2."
    sampled = [*ids_of(turns, said), turns.end]
    (following,) = turns.after(prompt, sampled, [answer])
    whole = of_transformers(turns, [question, {"role": "assistant", "content": "It is 2."}, answer])
    if name == "deepseek_r1_distill":  # it opens a thinking, and leaves it out of earlier turns
        assert whole[-len(following) :] == following
        assert prompt[-len(ids_of(turns, "<think>\n")) :] == ids_of(turns, "<think>\n")
    else:
        assert [*prompt, *sampled, *following] == whole
    stopped = turns.after(prompt, sampled[:-1], [answer])
    assert stopped == [[turns.end, *following]]
    other = [i for i in load_end_tokens(turns.chat.name, turns.chat.tokenizer) if i != turns.end]
    assert all(turns.after(prompt, [*sampled[:-1], end], [answer]) == [following] for end in other)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_answers_of_tools_are_those_of_the_chat_template(next_turn, name):
    turns = next_turn(name, tools=True)
    question = {"role": "user", "content": "1 + 1?"}
    _, prompt = turns.prompt([question])
    assert prompt == of_transformers(turns, [question])
    calls = [tool_call("calc", {"expression": e}, i) for i, e in enumerate(("1+1", "2/0"))]
    answers = [tool_message("calc", '"2".\n', 0), tool_message("calc", "error: division by zero", 1)]
    for number in (1, 1 + (name != "llama3_2")):
        asked = {"role": "assistant", "content": "", "tool_calls": calls[:number]}
        whole = of_transformers(turns, [question, asked, *answers[:number]])
        pieces = turns.after(prompt, [turns.end], answers[:number])
        following = [i for piece in pieces for i in piece]
        assert whole[-len(following) :] == following
        written = whole[len(prompt) : -len(following)]
        assert written[-1] == turns.end
        assert turns.calls(prompt, written) == [
            {"name": "calc", "arguments": call["function"]["arguments"]} for call in calls[:number]
        ]
    two = [turns.chat.tokenizer.decode(piece) for piece in turns.after(prompt, [turns.end], answers)]
    assert ["division" in text for text in two] == [False, True]
    assert ["2" in text for text in two] == [True, name == "mistral" and "000000001" in two[1] and "2" in two[1]]


@pytest.mark.parametrize("name", [name for name in CHAT_MODELS if name not in WITH_TOOLS])
def test_a_chat_template_without_tools_is_refused(made, name):
    with pytest.raises(RlvrError, match="knows no tools: with and without them it writes the same"):
        ChatTemplate(made(name), tools=[SCHEMA]).check_tools()


def test_thinking_stays_as_it_was_sampled(next_turn):
    turns = next_turn("qwen3", tools=True)
    question, answer = {"role": "user", "content": "1 + 1?"}, tool_message("calc", "2", 0)
    _, prompt = turns.prompt([question])
    thought = ids_of(turns, "<think>\nHm.\n</think>\n\nSo.<|im_end|>")
    plain = ids_of(turns, "So.<|im_end|>")
    assert turns.after(prompt, thought, [answer]) == turns.after(prompt, plain, [answer])
    off = next_turn("qwen3", thinking="off").after(prompt, plain, [{"role": "user", "content": "2"}])
    assert turns.chat.tokenizer.decode(off[0]).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ messages[-1].content }}", "leaves out or repeats an assistant's turn"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "with a token that ends the model's responses: it goes on with '2'"),
        (
            "{% for m in messages %}{{ m.content }}{% if not loop.last %} over{% endif %}<|im_end|>{% endfor %}",
            "it goes on with ' over",
        ),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
            "changes what comes before an answer",
        ),
        (
            "{% for m in messages %}{% if m.role == 'assistant' or loop.first %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}",
            "leaves out or repeats what answers a turn",
        ),
        (
            "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{{ messages | length }}",
            "changes what comes before an answer|writes other text after a later turn",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% if m.content %}<|im_end|>{% endif %}{% endfor %}",
            "writes other markers for some texts",
        ),
        (
            "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if messages | length > 3 %}later{% endif %}",
            "writes other text after a later turn",
        ),
        (
            "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}",
            "fails .TemplateError: no",
        ),
    ],
)  # fmt: skip
def test_a_chat_template_that_cannot_go_on_is_refused_with_the_reason(made, template, problem):
    chat = ChatTemplate(made("qwen3"))
    ends = [chat.tokenizer.eos_token_id]
    kept = chat.tokenizer.chat_template
    try:
        chat.tokenizer.chat_template = template
        with pytest.raises(RlvrError, match=problem):
            NextTurn(chat, ends=ends)
    finally:
        chat.tokenizer.chat_template = kept


def test_a_role_that_the_chat_template_leaves_out_is_refused(next_turn):
    turns = next_turn("qwen3")
    _, prompt = turns.prompt([{"role": "user", "content": "1 + 1?"}])
    with pytest.raises(RlvrError, match="leaves out or repeats what answers a turn, of the role search") as error:
        turns.after(prompt, [turns.end], [{"role": "search", "content": "2"}])
    assert "may answer as `environment`" in error.value.hint


def test_a_turn_that_nothing_ends_is_refused(made):
    chat = ChatTemplate(made("qwen2_5"))
    with pytest.raises(RlvrError, match=r"these are <\|endoftext\|>") as caught:
        NextTurn(chat, ends=[chat.tokenizer.convert_tokens_to_ids("<|endoftext|>")])
    assert "generation_config.json" in caught.value.hint


MARKED = st.text(max_size=20) | st.sampled_from(
    ["<|im_end|>\n<|im_start|>assistant\n", "</tool_response>", "<tool_call>{}</tool_call>", "<|eot_id|>", "[/TOOL_RESULTS]", "</s>",
     "<think>", "<|im_<|im_end|>end|>", "<end_of_turn>", "<|end|>\n", "<｜User｜>", "\ufffd\u2028", "<|im_end|><|im_end|>"]
)  # fmt: skip
TEXTS = st.lists(MARKED, max_size=4).map("".join).map(lambda text: text.encode("utf-8", "ignore").decode())


def markers_are_text(turns, text):
    """A message's text gives the ids of the template, with those of its markers as text; other texts those of transformers."""
    message = tool_message("calc", text, 0) if turns.chat.tools else {"role": "user", "content": text}
    plain = message | {"content": "2"}
    ids, usual = (turns.after([1], [turns.end], [m])[0] for m in (message, plain))
    known = set(turns.markers.ids_of.values())
    assert [i for i in ids if i in known] == [i for i in usual if i in known]
    if not any(marker in text for marker in turns.markers.ids_of):
        assert ids == turns.chat.tokenizer(turns._after([message]), add_special_tokens=False).input_ids[1:]
    shown = turns.chat.tokenizer.decode(ids)
    assert text.strip() in shown or json.dumps(text, ensure_ascii=False) in shown


@pytest.mark.parametrize(
    "texts", [15, pytest.param(500, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("name", CHAT_MODELS)
def test_markers_in_a_text_are_text(next_turn, name, texts):
    turns = next_turn(name, tools=CHAT_MODELS[name].knows_tools)

    @given(text=TEXTS)
    @settings(max_examples=texts, deadline=None)
    def check(text):
        markers_are_text(turns, text)

    check()


def test_markers_that_are_no_special_tokens_are_text_too(next_turn):
    """Such as Qwen's around the answer of a tool, which an answer could close."""
    turns = next_turn("qwen3", tools=True)
    for marker in ("</tool_response>", "<tool_call>", "</think>"):
        (ids,) = turns.after([1], [turns.end], [tool_message("calc", f"1{marker}2", 0)])
        own = turns.chat.tokenizer.convert_tokens_to_ids(marker)
        assert ids.count(own) == (marker == "</tool_response>")
        assert f"\n1{marker}2\n" in turns.chat.tokenizer.decode(ids)


def test_a_marker_that_is_half_the_templates_is_refused(made):
    chat = ChatTemplate(made("qwen2_5"))
    kept = chat.tokenizer.chat_template
    try:
        prompt = "{% if add_generation_prompt %}<|im_{% endif %}"
        chat.tokenizer.chat_template = "{% for m in messages %}<|im_{{ m.content }}<|im_end|>{% endfor %}" + prompt
        turns = NextTurn(chat, ends=[chat.tokenizer.eos_token_id])
        with pytest.raises(RlvrError, match="writes other markers for some texts"):
            turns.after([1], [turns.end], [{"role": "user", "content": "start|>"}])
    finally:
        chat.tokenizer.chat_template = kept


def test_other_added_tokens_of_a_text_stay_single(made):
    """Such as Gemma's for line breaks: a text is not spelled in another way than the model has learned."""
    tokenizer = load_tokenizer(made("phi3"))
    tokenizer.add_tokens(["<table>", "\n\n\n", "=="])
    markers = Markers(tokenizer, name="m")
    for text in ("<table>\n\n\n1 == 2", "<|end|>"):
        assert markers.ids(text) == tokenizer(text, add_special_tokens=False).input_ids
        hidden = markers.ids(markers.hide(text))
        assert (hidden == markers.ids(text)) == (text != "<|end|>")
        assert tokenizer.decode(hidden) == text


def test_a_prompt_of_messages_begins_as_every_text(made):
    """With the tokenizer's BOS, also where the chat template does not write it, and once."""
    chat = ChatTemplate(made("llama3_2"))
    kept, bos = chat.tokenizer.chat_template, chat.tokenizer.bos_token_id
    try:
        for template in (kept, kept.replace("{{- bos_token }}", "")):
            chat.tokenizer.chat_template = template
            _, ids = NextTurn(chat, ends=load_end_tokens(made("llama3_2"), chat.tokenizer)).prompt(
                [{"role": "user", "content": "1"}]
            )
            assert (ids[0], ids.count(bos)) == (bos, 1)
    finally:
        chat.tokenizer.chat_template = kept


def read(next_turn, name, text):
    turns = next_turn(name, tools=True)
    return turns.calls([1], ids_of(turns, text))


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("qwen3", "2<|im_end|>", []),
        ("qwen3", '<tool_call>\n{"name": "calc", "arguments": {}}\n</tool_call><|im_end|>', [{"name": "calc", "arguments": {}}]),
        ("qwen3", '<tool_call>{"name": "a"}</tool_call> <tool_call>{"name": "b", "arguments": "{\\"x\\": 1}"}</tool_call>',
         [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 1}}]),
        ("qwen3", '<think><tool_call>{"name": "a"}</tool_call></think>2', []),
        ("qwen3", '<think>So <tool_call>{"name": "a"}</tool_call> no<|im_end|>', []),
        ("qwen3", '<tool_call>{"name": 1}</tool_call>', 'this is not {"name": ..., "arguments": {...}}'),
        ("qwen3", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "its arguments are no JSON object"),
        ("qwen3", '<tool_call>{"name": "a"</tool_call>', "this is no JSON"),
        ("qwen3", '<tool_call>{"name": "a"}<|im_end|>', "there is no </tool_call>"),
        *(("qwen3", f'<tool_call>{{"name": "a", "arguments": {{"x": {"[" * n}{"]" * n}}}}}</tool_call>', "it is nested too deeply")
          for n in (200, 10_000)),
        ("qwen3", f'<tool_call>{{"name": "a", "arguments": "{"[" * 10_000}"}}</tool_call>', "its arguments are no JSON object"),
        ("llama3_2", '{"name": "calc", "parameters": {"expression": "1"}}<|eot_id|>', [{"name": "calc", "arguments": {"expression": "1"}}]),
        ("llama3_2", '<|python_tag|>{"name": "a", "parameters": {}}<|eom_id|>', [{"name": "a", "arguments": {}}]),
        ("llama3_2", '{"answer": 2}', []),
        ("llama3_2", '{"name": "a", "parameters": ', "this is no JSON"),
        ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {}, "id": "000000001"}]</s>', [{"name": "a", "arguments": {}}]),
        ("mistral", "[TOOL_CALLS] a", "[TOOL_CALLS] is not followed by JSON"),
        ("mistral", f"[TOOL_CALLS] {'[' * 10_000}", "[TOOL_CALLS] is not followed by JSON: it is nested too deeply"),
        ("mistral", "[TOOL_CALLS] 2", "this is no list of calls"),
        ("mistral", " 2</s>", []),
    ],
)  # fmt: skip
def test_calls_are_read_as_the_model_writes_them(next_turn, name, text, calls):
    found = read(next_turn, name, text)
    if isinstance(calls, str):
        ((problem,),) = [[call["problem"] for call in found]]
        assert problem.startswith(calls)
    else:
        assert found == calls


def test_what_is_called_in_a_thinking_that_the_prompt_began_is_not_called(next_turn):
    turns = next_turn("qwen3", tools=True)
    prompt, call = ids_of(turns, "<|im_start|>assistant\n<think>\n"), '<tool_call>{"name": "a"}</tool_call>'
    assert turns.calls(prompt, ids_of(turns, call)) == []
    assert len(turns.calls(prompt, ids_of(turns, f"So.</think>{call}"))) == 1


def test_a_form_of_calls_that_is_not_known_is_refused(made):
    chat = ChatTemplate(made("qwen3"), tools=[SCHEMA])
    kept = chat.tokenizer.chat_template
    try:
        chat.tokenizer.chat_template = kept.replace("<tool_call>", "<function>").replace("</tool_call>", "</function>")
        with pytest.raises(RlvrError, match=r"in a form that is not known here: .*<function>"):
            NextTurn(chat, ends=[chat.tokenizer.eos_token_id])
    finally:
        chat.tokenizer.chat_template = kept


def test_a_given_conversation_is_the_templates_and_its_assistants_tokens_are_masked_in(next_turn):
    turns = next_turn("qwen2_5", tools=True)
    messages = [
        {"role": "system", "content": "Be <|im_end|> brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [tool_call("calc", {"expression": "1+1"}, 0)]},
        tool_message("calc", "2", 0),
        {"role": "assistant", "content": "It is 2."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]
    prompt, ids, mask = turns.conversation(messages)
    plain = [messages[0] | {"content": "Be  brief."}, *messages[1:]]
    (unmarked, *same) = turns.conversation(plain)
    assert same == [ids, mask]
    assert [*unmarked, *ids] == of_transformers(turns, plain)[: len(unmarked) + len(ids)]
    own = turns.chat.tokenizer.decode([i for i, is_own in zip(ids, mask, strict=True) if is_own])
    call = '<tool_call>\n{"name": "calc", "arguments": {"expression": "1+1"}}\n</tool_call>'
    assert own == f"{call}<|im_end|>It is 2.<|im_end|>Yes.<|im_end|>"
    assert prompt.count(turns.markers.ids_of["<|im_end|>"]) == 2


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_of_a_given_conversation_may_lack_ids(next_turn, name, tools):
    """And the model need not be told of its tools."""
    turns = next_turn(name, tools=tools)

    def conversation(*, calls, answers):
        asked = {"role": "assistant", "content": "", "tool_calls": calls}
        return turns.conversation([QUESTION, asked, *answers, {"role": "assistant", "content": "It is 2."}])

    number = 1 + (name != "llama3_2")  # of calls in a turn
    calls = [tool_call("calc", {"expression": f"1+{i}"}, i) for i in range(number)]
    answers = [tool_message("calc", str(1 + i), i) for i in range(number)]
    bare = [call | {"id": None} for call in calls[:1]] + [{"function": call["function"]} for call in calls[1:]]
    said = [{"role": "tool", "content": answer["content"]} for answer in answers]
    assert conversation(calls=bare, answers=said) == conversation(calls=calls, answers=answers)
    own = [call | {"id": f"call{i:05d}"} for i, call in enumerate(calls)]
    given = [answer | {"tool_call_id": call["id"]} for answer, call in zip(answers, own, strict=True)]
    assert conversation(calls=own, answers=said) == conversation(calls=own, answers=given)
    _, ids, _ = conversation(calls=own, answers=given[::-1])
    shown = turns.chat.tokenizer.decode(ids)
    assert [shown.count(call["id"]) for call in own] == [2 * (name == "mistral")] * number


@pytest.mark.parametrize("prepends", [True, False])
@pytest.mark.parametrize(("template", "first"), [(LLAMA_2_TEMPLATE, "▁It"), (ZEPHYR_TEMPLATE, "It")])
def test_a_turn_begins_with_the_token_of_the_template_where_a_tokenizer_puts_a_space_before_texts(
    template, first, prepends
):
    tokenizer = sentencepiece_tokenizer(template, prepends=prepends)
    turns = NextTurn(ChatTemplate("sp", tokenizer=tokenizer), ends=[tokenizer.eos_token_id])
    said = {"role": "assistant", "content": "It is 2."}
    messages = [{"role": "user", "content": "1 + 1?"}, said, {"role": "user", "content": "Sure?"}, said]
    prompt, ids, mask = turns.conversation(messages)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)[: len(prompt + ids)]
    assert [*prompt, *ids] == whole
    begun = [i for i, own, before in zip(ids, mask, [False, *mask], strict=False) if own and not before]
    assert tokenizer.convert_ids_to_tokens(begun) == [first] * 2


@pytest.mark.parametrize("prepends", [True, False])
def test_a_turn_behind_a_space_begins_without_another_one(prepends):
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} ASSISTANT: "
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    tokenizer = sentencepiece_tokenizer(template, prepends=prepends)
    turns = NextTurn(ChatTemplate("sp", tokenizer=tokenizer), ends=[tokenizer.eos_token_id])
    prompt, ids, _ = turns.conversation([QUESTION, {"role": "assistant", "content": "It is 2."}])
    assert tokenizer.convert_ids_to_tokens([prompt[-1], ids[0]]) == ["▁", "It"]


def test_why_a_chat_template_writes_no_answer_of_a_tool_is_said_as_it_is(next_turn):
    turns = next_turn("phi3")
    asked = {"role": "assistant", "content": "", "tool_calls": [tool_call("calc", {}, 0)]}
    with pytest.raises(RlvrError, match="leaves out or repeats what answers a turn, of the role tool"):
        turns.conversation([QUESTION, asked, tool_message("calc", "2", 0), {"role": "assistant", "content": "2"}])


@pytest.mark.parametrize("name", [name for name in CHAT_MODELS if name != "deepseek_r1_distill"])
def test_an_end_marker_in_an_assistants_text_is_text(next_turn, name):
    """But for one at its end, which some datasets write; of several there, the first one."""
    turns = next_turn(name, tools=CHAT_MODELS[name].knows_tools)
    asked = {"role": "user", "content": "?"}

    def trained_on(content, **more):
        _, ids, mask = turns.conversation([asked, {"role": "assistant", "content": content, **more}])
        assert all(mask)
        return ids

    plain = trained_on("With it, a line\nfollows.")
    for i in load_end_tokens(turns.chat.name, turns.chat.tokenizer):
        end = turns.chat.tokenizer.decode([i])
        ids = trained_on(f"With {end}, a line\nfollows.")
        shown, without = map(turns.chat.tokenizer.decode, (ids, plain))
        assert shown == without.replace("With it,", f"With {end},")
        assert [place for place, token in enumerate(ids) if token in turns._end_ids] == [len(ids) - 1]
        for behind in ("", "\n", end, f"\n{end}", *turns._ends):
            assert trained_on(f"With it, a line\nfollows.{end}{behind}") == [*plain[:-1], i]
        if turns.chat.tools:
            ids = trained_on("", tool_calls=[tool_call("calc", {"expression": f"1{end}1"}, 0)])
            assert f"1{end}1" in turns.chat.tokenizer.decode(ids)
            assert [place for place, token in enumerate(ids) if token in turns._end_ids] == [len(ids) - 1]


def test_a_given_thinking_is_trained_on_in_every_turn(next_turn):
    turns = next_turn("qwen3")
    said = [{"role": "assistant", "content": f"<think>\n{word}\n</think>\n\n{word}"} for word in "ab"]
    asked = {"role": "user", "content": "?"}
    _, ids, mask = turns.conversation([asked, said[0], asked, said[1]])
    own = turns.chat.tokenizer.decode([i for i, is_own in zip(ids, mask, strict=True) if is_own])
    assert own == "".join(f"{message['content']}<|im_end|>" for message in said)
    with pytest.raises(RlvrError, match="does not put an assistant's turn where its generation prompt ends"):
        next_turn("deepseek_r1_distill").conversation([asked, said[0]])


@pytest.mark.parametrize("name", ["qwen3", "llama3_2"])
def test_renderers_and_the_chat_template_agree(made, next_turn, name):
    pytest.importorskip("renderers", reason="needs the extra renderers")
    difference = next_turn(name, tools=True)
    chat = difference.chat
    ends = load_end_tokens(made(name), chat.tokenizer)
    extended = NextTurn(chat, ends=ends, model=CHAT_MODELS[name].name)
    assert extended.way.startswith("the next turn is what renderers gives")
    _, prompt = difference.prompt([{"role": "user", "content": "1 + 1?"}])
    call = {"qwen3": '<tool_call>\n{"name": "calc", "arguments": {"expression": "1"}}\n</tool_call>'}
    call["llama3_2"] = '{"name": "calc", "parameters": {"expression": "1"}}'
    for said in ("", call[name]):
        for end in ([], [difference.end]):
            sampled = [*ids_of(difference, said), *end]
            for text in ("2", "", "a.\n", "<|im_end|></tool_response><|eot_id|>"):
                messages = [tool_message("calc", text, 0), tool_message("calc", "3", 1)]
                assert extended.after(prompt, sampled, messages) == difference.after(prompt, sampled, messages)
    assert extended.calls(prompt, sampled) == difference.calls(prompt, sampled)
    for deep in (200, 10_000):
        sampled = ids_of(difference, call[name].replace('"1"', f"{'[' * deep}{']' * deep}"))
        assert [*map(sorted, extended.calls(prompt, sampled))] == [["name", "problem"]]
    chat.tokenizer.chat_template, kept = (
        chat.tokenizer.chat_template.replace("<tool_response>", "<tool_answer>").replace("ipython<", "tool<"),
        chat.tokenizer.chat_template,
    )
    try:
        assert (
            "writes other tokens than its chat template" in NextTurn(chat, ends=ends, model=CHAT_MODELS[name].name).way
        )
    finally:
        chat.tokenizer.chat_template = kept


UNFINISHED = '<think>\nOr <tool_call>\n{"name": "calc", "arguments": {"expression": "1"}}\n</tool_call> but'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", UNFINISHED),
        ("qwen3", '<tool_call>\n{"name": "calc", "arguments": "{\\"expression\\": 1}"}\n</tool_call>'),
        ("llama3_2", '<|python_tag|>{"name": "calc", "parameters": {"expression": "1"}}'),
    ],
)
def test_calls_are_read_with_renderers_as_without(made, next_turn, name, text):
    pytest.importorskip("renderers", reason="needs the extra renderers")
    difference = next_turn(name, tools=True)
    extended = NextTurn(difference.chat, ends=[difference.end], model=CHAT_MODELS[name].name)
    assert extended.way.startswith("the next turn is what renderers gives")
    _, prompt = difference.prompt([QUESTION])
    sampled = [*ids_of(difference, text), difference.end]
    assert extended.calls(prompt, sampled) == difference.calls(prompt, sampled)


def test_calls_in_a_form_that_renderers_alone_knows(made):
    pytest.importorskip("renderers", reason="needs the extra renderers")
    chat = ChatTemplate(made("qwen3"), tools=[SCHEMA])
    kept = chat.tokenizer.chat_template
    try:
        chat.tokenizer.chat_template = kept.replace("<tool_call>", "<function>").replace("</tool_call>", "</function>")
        turns = NextTurn(chat, ends=[chat.tokenizer.eos_token_id], model=CHAT_MODELS["qwen3"].name)
        _, prompt = turns.prompt([QUESTION])

        def calls(text):
            return turns.calls(prompt, [*ids_of(turns, text), turns.end])

        call = '<tool_call>\n{"name": "calc", "arguments": {}}\n</tool_call>'
        assert calls(call) == [{"name": "calc", "arguments": {}}]
        assert calls(UNFINISHED) == []
        (unread,) = calls(call.replace('"calc"', "5"))
        assert unread == {"name": "", "problem": "the call cannot be read: its name is no text"}
        for depth in (200, 100_000):
            (unread,) = calls(call.replace("{}", '{"x": ' + "[" * depth + "]" * depth + "}"))
            assert unread["problem"] == "the call cannot be read: it is nested too deeply"
    finally:
        chat.tokenizer.chat_template = kept
