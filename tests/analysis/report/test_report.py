"""The report as HTML: its structure, what hostile text does to it (nothing), and that what is in it is what is in the runs."""

import base64
import dataclasses
import functools
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import accumulate, pairwise
from pathlib import Path

import duckdb
import pytest

from factories import a_conversation, a_rollout
from marks import slow
from rlvr_cli.analysis.pictures.picture import COLORS, Line, Panel, Picture
from rlvr_cli.analysis.queries.database import MemoryNeeded
from rlvr_cli.analysis.report import rollouts as report_rollouts
from rlvr_cli.analysis.report.build import said_if_too_much, searches_of, write_report
from rlvr_cli.analysis.report.episodes import turns_of
from rlvr_cli.analysis.report.page import Browser, Grid, LeftOut, Report, Setting, Share, render_page
from rlvr_cli.analysis.report.rollouts import Group, choose_groups
from rlvr_cli.analysis.report.token_spans import token_lengths, token_pieces
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Judgement, Measured

VOID = {"meta"}
PAYLOADS = [
    "<script>window.__pwned = 1</script>",
    "</script><script>window.__pwned = 1</script>",
    "</SCRIPT ><svg onload=window.__pwned=1>",
    "<!--<script>",
    "--><img src=x onerror=window.__pwned=1>",
    "]]><x>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "&#60;script&#62;",
    "<style>*{display:none}</style>",
    "<base href=//evil.example>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<iframe srcdoc='<script>parent.__pwned=1</script>'>",
    "javascript:alert(1)",
    "{{7*7}}${7*7}<%= 7*7 %>",
    "</pre></details></section></main></body></html>",
    "<textarea><title><noscript><template>",
    "\x00\x01\x1b[2J\x1b]0;title\x07\x7f\x9b",
    "\u202egnp.exe\u2066\u2069\u200b\ufeff\u2028\u2029",
]
PAYLOADS += [f"{before}{payload}" for payload in PAYLOADS for before in ('">', "'>", "</script>", "-->")]
assert len(PAYLOADS) == 100


class Parsed(HTMLParser):
    """The elements of a page with their attributes, and the text of each that is of interest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.texts: list[str] = []  # of each element, without its children's
        self.open: list[int] = []
        self.feed(text)
        self.close()
        assert not self.open, [self.elements[i][0] for i in self.open]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, tuple(attrs)))
        self.texts.append("")
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_endtag(self, tag):
        assert self.elements[self.open.pop()][0].lower() == tag

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]] += data

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    def all(self, tag, **attributes):
        """(attributes, text) of each such element."""
        found = [(dict(a), t) for (name, a), t in zip(self.elements, self.texts, strict=True) if name == tag]
        return [(a, t) for a, t in found if attributes.items() <= a.items()]

    def data(self, name):
        """The value in a block of data."""
        ((attributes, text),) = self.all("script", id=name)
        if attributes["type"] == "application/gzip":
            text = gzip.decompress(base64.b64decode(text, validate=True)).decode()
        return json.loads(text)


def report_of(text: str) -> Report:
    """A report that has the text wherever a text may stand."""
    lines = [
        Line((0, 1), (0.5, 0.7), low=(0.4, 0.6), high=(0.6, 0.8), series=s, variant=v) for s in (0, 1) for v in (0, 1)
    ]
    panel = Panel(text, text, text, tuple(lines))
    index = {"rows": 1, "starts": [0], "columns": {"category": {"codes": [0], "values": [text]}}, "tokenizers": [text]}
    return Report(
        runs=(text, "other"),
        alarms=[{"name": text, "severity": text, "sentence": text, "query": text}],
        summary=[Grid(text, (text, "share"), [(text, Share(0.5, 0.4, 0.6)), (None, 1.5)])],
        charts=Picture(
            (panel, dataclasses.replace(panel, places=(text, "b"))), (text, "c"), (text, "d"), text, (text,)
        ),
        browser=Browser(index, [], [], note=text),
        configuration=[
            Setting(text, (text, "b"), (text, "flag")),
            Setting("c", (text * 300, text * 300), ("flag", text)),
        ],
        environment=[Setting(text, (text, text))],
        left_out=[LeftOut("Summary", text, text)],
    )


def rollout(run_id, example, sample, *, phase="eval", step=0, response="r", **changes):
    values = {
        "run_id": run_id, "phase": phase, "step": step, "policy_version": step, "example_id": example,
        "sample_index": sample, "prompt": f"{example}?", "response": response,
        "response_ids": tuple(response.encode()), "sampled_logprobs": tuple(-0.25 for _ in response.encode()),
        "num_response_tokens": len(response.encode()), "answer_reward": 0.0, "reward": 0.0,
        "extracted_answer": "8", "category": "format_1_answer_0", "failure_kind": "wrong_answer",
        "mean_logprob": -0.25, "mean_entropy": 0.5, "seed": 2**62 + 1,
    }  # fmt: skip
    return a_rollout(**{**values, **changes})


def make_run(root, name, rollouts, *, metadata=None, metrics=(), diverged=""):
    why = {"diverged": {"why": diverged}} if diverged else {}
    with RunDir.create(root, "grpo", name=name, metadata={**(metadata or {}), **why}) as run:
        for phase, step in sorted({(r.phase, r.step) for r in rollouts}):
            run.commit_rollouts(phase, step, [r for r in rollouts if (r.phase, r.step) == (phase, step)])
        for step, phase, values in metrics:
            run.commit_metrics(step, phase, values)
        if diverged:
            run.finish("diverged")
    return root / name


def byte_tokenizer() -> bytes:
    """A tokenizer.json whose ids are bytes; 256 is the end, and stands for nothing."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in themselves]
    vocabulary = {chr(b): b for b in themselves} | {chr(256 + i): b for i, b in enumerate(others)}
    added = [{"id": 256, "content": "<end>", "special": True}]
    model = {"type": "BPE", "vocab": vocabulary}
    return json.dumps({"model": model, "decoder": {"type": "ByteLevel"}, "added_tokens": added}).encode()


def read(path: Path) -> Parsed:
    return Parsed(path.read_text(encoding="utf-8"))


@functools.cache
def plain_page() -> Parsed:
    return Parsed(render_page(report_of("text")))


@pytest.mark.parametrize("payload", [p if i % 9 == 0 else slow(p) for i, p in enumerate(PAYLOADS)])
def test_no_text_changes_the_structure_of_the_page(payload):
    plain, hostile = plain_page(), Parsed(render_page(report_of(payload)))

    def structure(parsed):
        return [(tag, tuple(name for name, _ in attributes)) for tag, attributes in parsed.elements]

    assert structure(hostile) == structure(plain)
    ((_, block),) = hostile.all("script", id="rollout-index")
    assert block.isascii()
    assert not set("<>&") & set(block)
    assert hostile.data("rollout-index")["tokenizers"] == [payload]


def test_hostile_text_is_shown_with_its_controls_visible():
    parsed = Parsed(render_page(report_of("a\x1b[2J\u202eb<i>")))
    assert parsed.all("h1")[0][1] == "a\\x1b[2J\\u202eb<i>, other"


def test_the_policy_names_the_style_and_the_script_by_their_hashes_and_nothing_else():
    parsed = Parsed(render_page(report_of("text")))
    ((attributes, _),) = [m for m in parsed.all("meta") if m[0].get("http-equiv") == "Content-Security-Policy"]
    policy = dict(part.strip().split(" ", 1) for part in attributes["content"].split(";"))

    def digest(text):
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    ((_, style),) = parsed.all("style")
    ((_, script),) = [s for s in parsed.all("script") if not s[0]]
    assert policy == {
        "default-src": "'none'",
        "style-src": digest(style),
        "script-src": digest(script),
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


def test_nothing_in_the_page_names_another_place_or_an_event_handler():
    parsed = Parsed(render_page(report_of("text")))
    for tag, attributes in parsed.elements:
        for name, value in attributes:
            assert not name.startswith("on"), tag
            assert name not in {"style", "src", "srcset", "action", "data", "poster", "background"}, tag
            assert name != "href" or value.startswith("#"), value
    code = "".join(text for _, text in parsed.all("style") + [s for s in parsed.all("script") if not s[0]])
    assert not re.search(
        r"https?:|url\(|@import|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", code
    )


def test_a_page_with_all_rollouts_needs_a_database_and_one_for_each_summary(tmp_path, monkeypatch):
    opened, connect = [], duckdb.connect

    def counted(*arguments, **given):
        opened.append(arguments)
        return connect(*arguments, **given)

    run = make_run(tmp_path, "r", [rollout("r", "q", 0)])
    monkeypatch.setattr(duckdb, "connect", counted)
    assert read(write_report([run])).data("rollout-index")["rows"] == 1
    assert len(opened) == 2


def test_the_blocks_hold_every_rollout_as_it_was(tmp_path):
    responses = ["one", "zwei ½", "<script>", "</script>\u2028", "\x1b[0m", "数学 😀", "a\\u003cb", "&amp;"]
    rows = [rollout("r", f"q{i // 4}", i % 4, phase="train", step=3, response=text) for i, text in enumerate(responses)]
    run = make_run(tmp_path, "r", rows)
    path = write_report([run])
    assert path == run / "report.html"
    parsed = read(path)
    index, texts, tokens = parsed.data("rollout-index"), parsed.data("texts-0"), parsed.data("tokens-0")

    def column(name):
        return [index["columns"][name]["values"][code] for code in index["columns"][name]["codes"]]

    assert index["rows"] == 8
    assert column("example_id") == ["q0"] * 4 + ["q1"] * 4
    assert column("sample_index") == [0, 1, 2, 3] * 2
    assert column("reward") == [0.0] * 8
    assert texts["response"] == responses
    assert [texts["prompt"]["values"][code] for code in texts["prompt"]["codes"]] == ["q0?"] * 4 + ["q1?"] * 4
    assert texts["seed"] == [str(2**62 + 1)] * 8  # a double would round it
    assert tokens["centinats"] == [[25] * len(text.encode()) for text in responses]
    assert tokens["lengths"] == [None] * 8  # the run has no tokenizer
    assert index["tokenizers"] == []


def test_ids_that_begin_alike_stay_apart_and_long_answers_are_whole_among_the_texts(tmp_path):
    ids = ["q" * 200 + end for end in "ab"]
    rows = [rollout("r", name, 0, ground_truth="7" * 100, extracted_answer="8" * 100) for name in ids]
    parsed = read(write_report([make_run(tmp_path, "r", rows)]))
    columns = parsed.data("rollout-index")["columns"]
    assert columns["example_id"]["values"] == ids
    assert columns["ground_truth"]["values"] == ["7" * 60 + "…"]
    assert parsed.data("texts-0")["ground_truth"] == ["7" * 100] * 2


@pytest.mark.parametrize(
    ("prompt", "template", "question"),
    [
        (
            "Solve.\nUser: What is\n 1+1?\nAssistant: <think>",
            "Solve.\nUser: {question}\nAssistant: <think>",
            "What is 1+1?",
        ),
        ("<|im_start|>user\nSolve: 1+1?<|im_end|>", "Solve: {question}", "1+1?<|im_end|>"),
        ("<s>Think. 1+1? Answer:</s>", "Think. {question} Answer:", "1+1?"),
        ("another prompt", "Solve: {question}", "another prompt"),
        ("1+1?", "{question}", "1+1?"),
        ("1+1?", "", "1+1?"),
        ("Solve: ", "Solve: {question}", "Solve:"),
    ],
)
def test_the_question_is_what_stands_in_the_template(prompt, template, question):
    assert report_rollouts.question_in(prompt, template) == question


def test_the_list_has_the_question_of_each_prompt(tmp_path):
    facts = {"prompt": {"text": "Think.\nUser: {question}\nAssistant:"}}
    rows = [rollout("r", f"q{i}", 0, prompt=f"Think.\nUser: {'very ' * 50 * i}long {i}?\nAssistant:") for i in range(2)]
    parsed = read(write_report([make_run(tmp_path, "r", rows, metadata={"facts": facts})]))
    short, cut = parsed.data("rollout-index")["columns"]["question"]["values"]
    assert short == "long 0?"
    assert cut == ("very " * 50)[:160] + "…"


def test_rollouts_are_listed_as_people_count(tmp_path):
    rows = [rollout("r", name, 0) for name in ("q-10", "q-9", "q-010", "q", "p-2", "q-x")]
    parsed = read(write_report([make_run(tmp_path, "r", rows)]))
    assert parsed.data("rollout-index")["columns"]["example_id"]["values"] == [
        "p-2",
        "q",
        "q-9",
        "q-010",
        "q-10",
        "q-x",
    ]


def test_numbers_that_json_lacks_are_kept_as_text(tmp_path):
    nan = float("nan")
    row = rollout("r", "q", 0, response="ab", reward=nan, sampled_logprobs=(-0.5, float("-inf")), mean_logprob=nan)
    parsed = read(write_report([make_run(tmp_path, "r", [row])]))
    assert parsed.data("rollout-index")["columns"]["reward"]["values"] == ["nan"]
    assert parsed.data("texts-0")["mean_logprob"] == ["nan"]
    assert parsed.data("tokens-0")["centinats"] == [[50, None]]


def test_what_an_environment_wrote_has_no_log_probability(tmp_path):
    row = rollout("r", "q", 0, response="abc", sampled_logprobs=(-0.5, 0.0, -0.25), response_mask=(True, False, True))
    parsed = read(write_report([make_run(tmp_path, "r", [row])]))
    assert parsed.data("tokens-0")["centinats"] == [[50, None, 25]]


SAID = [
    ("policy", "½<calc>1</calc>"),
    ("calc", "<script>"),
    ("policy", "<out>2</out>"),
    ("search", "😀"),
    ("policy", "7"),
]


@pytest.mark.parametrize("tokenizer", [True, False])
def test_an_episode_is_a_conversation(tmp_path, tokenizer):
    """Also without the tokenizer: where each turn ends in the text is stored."""
    said = a_conversation(
        *SAID, turn_rewards=(0.5, None, 1.0), failed_turns=(0,), forged_turns=(1,), tool_errors=1, forged=1
    )
    said["measured"] = (Measured("moves", 3.0),)
    run = make_run(tmp_path, "r", [rollout("r", "q", 0, **said), rollout("r", "q", 1, response="one turn")])
    if tokenizer:
        (run / "model").mkdir()
        (run / "model" / "tokenizer.json").write_bytes(byte_tokenizer())
    texts = read(path := write_report([run])).data("texts-0")
    turns, none = texts["turns"]
    assert none is None
    assert [turn["role"] for turn in turns] == [role for role, _ in SAID]
    ends = list(accumulate(turn["length"] for turn in turns))
    units = texts["response"][0].encode("utf-16-le")  # as JavaScript counts
    assert [units[2 * a : 2 * b].decode("utf-16-le") for a, b in pairwise([0, *ends])] == [text for _, text in SAID]
    assert [turn["tokens"] for turn in turns] == [len(text.encode()) for _, text in SAID]
    assert [turn["reward"] for turn in turns] == [0.5, None, None, None, 1.0]
    assert [turn["marks"] for turn in turns] == [["its call failed"], [], ["forged answer"], [], []]
    assert texts["episode"][0] == {
        "ended_by": "policy", "tool_calls": 2, "tool_errors": 1, "forged": 1, "environment_seconds": 0.5, "tokens": len(said["response_ids"]),
        "measured": [["moves", 3.0]],
    }  # fmt: skip
    listed = read(path).data("rollout-index")["columns"]["num_response_tokens"]
    assert listed["values"][listed["codes"][0]] == sum(said["response_mask"])
    assert texts["episode"][1] is None
    (lengths, _) = read(path).data("tokens-0")["lengths"]
    assert lengths is None if not tokenizer else sum(lengths) == ends[-1]


def test_what_a_judge_said_is_in_the_page(tmp_path):
    said = Judgement("Well. 😀\n8", "8", "big", "00" * 32, 50, 5, cached=True)
    run = make_run(tmp_path, "r", [rollout("r", "q", 0, judgement=said), rollout("r", "q", 1)])
    assert read(write_report([run])).data("texts-0")["judgement"] == [
        {"reply": "Well. 😀\n8", "score": "8", "model": "big", "prompt_tokens": 50, "reply_tokens": 5, "cached": True}, None
    ]  # fmt: skip


def test_the_turns_of_a_thinking_budget_are_found_by_their_tokens():
    said = a_conversation(("policy", "hm"), ("environment", "½ </think>"), ("policy", " 7"))
    turns = [turn._asdict() for turn in said["turns"]]
    row = {**said, "turns": turns, "episode": None, "turn_facts": None}
    found, lengths = turns_of(row, pieces={i: bytes([i]) for i in range(256)})
    assert found is not None
    assert [(turn["role"], turn["length"]) for turn in found] == [("policy", 2), ("environment", 10), ("policy", 2)]
    assert sum(lengths or ()) == len(said["response"])
    assert turns_of(row, pieces={}) == (None, None)  # as one text, where its tokens are unknown


def test_an_episode_that_does_not_fit_its_turns_is_one_text():
    """A file of another program: `rlvr check` says what is wrong with it."""
    said = a_conversation(("policy", "a"), ("calc", "b"))
    row = {**said, "turns": [turn._asdict() for turn in said["turns"]], "episode": said["episode"]._asdict()}
    facts = said["turn_facts"]._replace(ends=(1,))._asdict()
    assert turns_of({**row, "turn_facts": facts}, pieces={}) == (None, None)
    found, _ = turns_of({**row, "turn_facts": None}, pieces={i: bytes([i]) for i in range(256)})  # of an older run
    assert [(turn["role"], turn["length"]) for turn in found or ()] == [("policy", 1), ("calc", 1)]


def test_the_tokens_of_a_response_are_found_in_its_text(tmp_path):
    run = make_run(tmp_path, "r", [rollout("r", "q", 0, response="aß😀", response_ids=(*"aß😀".encode(), 256))])
    (run / "model").mkdir()
    (run / "model" / "tokenizer.json").write_bytes(byte_tokenizer())
    parsed = read(write_report([run]))
    assert parsed.data("rollout-index")["tokenizers"] == ["r"]
    assert parsed.data("tokens-0")["lengths"] == [[1, 0, 1, 0, 0, 0, 2, 0]]  # 😀 is two units of UTF-16


def test_the_tokenizer_of_a_sampled_model_is_read_only_when_it_is_the_one_of_the_run(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_bytes(byte_tokenizer())
    line = f"tokenizer.json {hashlib.sha256(byte_tokenizer()).hexdigest()}\n"
    for digest, known in ((hashlib.sha256(line.encode()).hexdigest(), ["a"]), ("0" * 64, [])):
        facts = {"model": {"path": str(model), "tokenizer_sha256": digest}}
        run = make_run(tmp_path / digest[:8], "a", [rollout("a", "q", 0)], metadata={"facts": facts})
        assert read(write_report([run])).data("rollout-index")["tokenizers"] == known


@pytest.mark.parametrize("text", ["", "What is 12 + 30?", "naïve café, 数学, 😀 ½ × π", " </answer>  x", "a\nb\t"])
def test_token_lengths_agree_with_the_tokenizer(text, tiny_tokenizer, tiny_model_dir):
    pieces = token_pieces((tiny_model_dir / "tokenizer.json").read_bytes())
    ids = tiny_tokenizer(text)["input_ids"]
    lengths = token_lengths([*ids, tiny_tokenizer.eos_token_id], text, pieces=pieces)
    assert lengths is not None
    assert len(lengths) == len(ids) + 1
    units = text.encode("utf-16-le")
    assert sum(lengths) * 2 == len(units)
    for i in range(len(ids)):  # what is decoded whole at a token's end is what the lengths say
        before = tiny_tokenizer.decode(ids[: i + 1])
        if "\ufffd" not in before:
            assert units[: 2 * sum(lengths[: i + 1])].decode("utf-16-le") == before


def test_token_lengths_at_the_edges():
    pieces = {1: b" a", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b"</answer>\n", 5: b""}
    assert token_lengths([1, 4], " a</answer>", pieces=pieces) == [2, 9]  # the stop string cuts the last token
    assert token_lengths([1, 1], "a a", pieces=pieces) == [1, 2]  # a tokenizer that drops the first space
    assert token_lengths([2, 3, 5], "é", pieces=pieces) == [0, 1, 0]
    assert token_lengths([1, 2], " a\ufffd", pieces=pieces) == [2, 1]  # broken off within a character
    assert token_lengths([1], " b", pieces=pieces) is None
    assert token_lengths([1], " aa", pieces=pieces) is None
    assert token_lengths([9], " a", pieces=pieces) is None
    assert token_lengths([], "", pieces=pieces) == []
    assert token_lengths([], "a", pieces=pieces) is None


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"model": 3}', b"[" * 100_000, b"\xff"])
def test_a_file_that_is_no_tokenizer_has_no_pieces(data):
    assert token_pieces(data) == {}


def groups(*cells):
    """Groups of (phase, step, how many, rows of each)."""
    return [Group("r", phase, step, f"q{i}", rows, 10) for phase, step, count, rows in cells for i in range(count)]


def test_choose_keeps_the_last_and_the_first_step_and_those_between():
    every = groups(*(("train", step, 2, 4) for step in range(9)))  # 8 rows in each step
    assert {g.step for g in choose_groups(every, 16)} == {0, 8}
    assert {g.step for g in choose_groups(every, 24)} == {0, 4, 8}
    assert {g.step for g in choose_groups(every, 40)} == {0, 2, 4, 6, 8}
    assert {g.step for g in choose_groups(every, 8)} == {8}
    assert choose_groups(every, 72) == every


def test_choose_gives_each_phase_its_part_and_cuts_no_group():
    every = groups(("eval", 0, 5, 1), ("train", 0, 100, 8))
    kept = choose_groups(every, 45)
    assert [g.phase for g in kept].count("eval") == 5  # all of the small one
    train = [int(g.example_id[1:]) for g in kept if g.phase == "train"]
    assert len(train) == 5  # 40 of 800 rows
    assert train[0] == 0
    assert train[-1] == 99
    assert max(b - a for a, b in pairwise(train)) < 50


def test_a_page_says_what_it_left_out(tmp_path, monkeypatch):
    rows = [rollout("r", f"q{i}", 0, phase="train", step=step) for step in range(5) for i in range(4)]
    run = make_run(tmp_path, "r", rows)
    with monkeypatch.context() as fewer:
        fewer.setattr(report_rollouts, "MAX_ROLLOUTS", 8)
        parsed = read(write_report([run], tmp_path / "small.html"))
    assert parsed.data("rollout-index")["rows"] == 8
    ((_, note),) = parsed.all("p", **{"class": "note"})
    assert note.startswith("This page has 8 of 20 rollouts (limited to 8 rollouts)")
    assert "r train: 2 of 5 steps" in note
    assert not read(write_report([run])).all("p", **{"class": "note"})
    monkeypatch.setattr(report_rollouts, "MAX_TOKENS", 10)
    ((_, note),) = read(write_report([run])).all("p", **{"class": "note"})
    assert note.startswith("This page has 10 of 20 rollouts (limited to 10 tokens)")


def test_the_page_of_two_runs_says_how_they_differ(tmp_path):
    def one(name, rate):
        metadata = {
            "config": {"learning_rate": rate, "group_size": 8, "seed": 0} | ({"kl_coef": 0.5} if name == "b" else {}),
            "sources": {"learning_rate": "flag", "group_size": "preset quickstart", "seed": "default"},
            "environment": {"argv": ["rlvr", "grpo"], "packages": {"torch": "2.13"}, "gpus": None},
        }
        correct = {"reward": 1.0, "answer_reward": 1.0, "category": "format_1_answer_1", "failure_kind": None}
        rows = [rollout(name, f"q{i}", 0, **(correct if i == 0 else {})) for i in range(4)]
        metrics = [(s, "train", {"reward/mean": s / 4, "optimizer/grad_norm": 1.0}) for s in range(3)]
        diverged = "1 < 2" if name == "b" else ""
        return make_run(tmp_path, name, rows, metadata=metadata, metrics=metrics, diverged=diverged)

    path = write_report([one("a", 0.1), one("b", 0.2)], tmp_path / "out.html")
    parsed, text = read(path), path.read_text(encoding="utf-8")
    assert parsed.all("title")[0][1] == "rlvr: a, b"
    titles = [t for _, t in parsed.all("h3")]
    assert titles[:3] == ["Accuracy, lengths and entropy", "Categories", "Why there was no reward"]
    assert "What differs between the runs" in titles
    assert re.search(r"learning_rate</th><td><code>0.1</code> <small>flag</small></td><td><code>0.2</code>", text)
    assert re.search(r"group_size</th><td><code>8</code></td><td>preset quickstart", text)
    summaries = [t for _, t in parsed.all("summary")]
    assert "1 at their defaults" in summaries  # seed
    assert "1 that only some of the runs have" in summaries
    assert re.search(r"kl_coef</th><td><span>–</span></td><td><code>0.5</code>", text)
    assert "25.0% [3.4%, 71.1%]" in text  # Agresti and Coull, 1 in 4
    assert "torch" in text
    assert [t for _, t in parsed.all("figcaption")] == ["Training reward", "Gradient norm"]
    ((_, legend),) = [
        (a, re.findall(r"</svg>([^<]*)</li>", t))
        for a, t in [({}, text.split('<ul class="legend">')[1].split("</ul>")[0])]
    ]
    assert legend == ["learning_rate 0.1", "learning_rate 0.2"]
    assert any(t == "learning_rate 0.1 at 2: 0.5" for _, t in parsed.all("title"))
    assert "b: it diverged: 1 &lt; 2" in text
    assert f"rlvr analyze curves {tmp_path}/b" in [t for _, t in parsed.all("pre")]
    again = write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "again.html")
    assert again.read_bytes() == path.read_bytes()


def test_the_page_of_runs_of_one_name(tmp_path):
    old, new = (make_run(tmp_path / folder, "a", [rollout("a", "q", 0)]) for folder in ("old", "new"))
    parsed = read(write_report([old, new, old], tmp_path / "out.html"))
    assert parsed.all("title")[0][1] == "rlvr: old/a, new/a"
    parsed = read(write_report([new.rename(tmp_path / "copy")], tmp_path / "out.html"))
    assert parsed.all("title")[0][1] == "rlvr: copy"
    assert parsed.data("rollout-index")["columns"]["run_id"]["values"] == ["copy"]


def test_no_command_is_said_to_have_more_memory():
    left_out = []
    with said_if_too_much(left_out, "Summary", "It is", "rlvr analyze summary a"):
        raise MemoryNeeded("The query needed more than 2GB of memory.")
    assert [(one.sentence, one.command) for one in left_out] == [
        ("It is left out. The query needed more than 2GB of memory.", "")
    ]


def test_runs_that_are_no_searches_are_not_asked_for_what_searches_find(tmp_path):
    assert searches_of(None, [read_run(make_run(tmp_path, "r", [rollout("r", "q", 0)]))]) == []


def test_a_run_without_rollouts_or_metrics_has_a_page(tmp_path):
    parsed = read(write_report([make_run(tmp_path, "r", [])]))
    assert parsed.data("rollout-index")["rows"] == 0
    assert [t for _, t in parsed.all("h2")] == [
        "Curves",
        "Alarms",
        "Summary",
        "Rollouts",
        "Configuration",
        "Environment",
    ]


def charts(*panels, series=("l", "m")):
    return Parsed(render_page(dataclasses.replace(report_of("text"), charts=Picture(panels, series))))


def test_points_that_cannot_be_drawn_are_gaps():
    nan = float("nan")
    line = Line((0, 1, 2, 3, 4), (0.5, nan, None, 0.6, float("inf")))
    parsed = charts(Panel("t", "x", "y", (line,)), Panel("n", "x", "y", (Line((0,), (nan,)),)))
    assert [t for _, t in parsed.all("title")][1:] == ["l at 0: 0.5", "l at 3: 0.6"]
    assert ("p", "No data.") in [("p", t) for _, t in parsed.all("p")]
    assert "nan" not in "".join(str(a.get("d")) for a, _ in parsed.all("path"))


def test_the_page_has_the_colors_marks_and_axes_of_the_pictures():
    lines = tuple(Line((0, 10), (0.05, 0.2), series=i) for i in range(2))
    parsed = charts(Panel("one", "x", "y", lines), Panel("two", "x", "y", lines[1:]))
    classes = [a["class"] for a, _ in parsed.all("g")]
    assert classes == [
        "series c0 d0",
        "series c1 d0",
        "series c0 d0",
        "series c1 d0",
        "series c1 d0",
    ]  # the legend first
    ((_, style),) = parsed.all("style")
    light = dict(re.findall(r"--c(\d): (#\w{6})", style.split("@media")[0]))
    assert [light[str(i)].upper() for i in range(len(COLORS))] == [color.upper() for color in COLORS]
    ticks = [t for a, t in parsed.all("text") if a["class"] == "tick y"]
    assert ticks[: len(ticks) // 2] == ticks[len(ticks) // 2 :] == ["0", "0.05", "0.1", "0.15", "0.2"], "the same axis"


def test_points_that_are_not_joined_are_dots_that_show_their_value():
    parsed = charts(Panel("t", "x", "y", (Line((0, 1), (0.5, 0.6), joined=False),)), series=("l",))
    (drawing,) = [a["d"] for a, _ in parsed.all("path", **{"class": "line"})]
    assert re.fullmatch(r"(M[\d.]+ [\d.]+h0){2}", drawing)
    assert len(parsed.all("path", **{"class": "hidden marker"})) == 2
    assert [t for _, t in parsed.all("title")][1:] == ["at 0: 0.5", "at 1: 0.6"]


def test_two_seeds_are_faint_lines_with_their_gaps():
    nan = float("nan")
    line = Line((0, 1, 2), (0.5, 0.5, 0.5), seeds=((0.2, nan, 0.4), (0.8, 0.7, 0.6)))
    (faint,) = charts(Panel("t", "x", "y", (line,)), series=("l",)).all("path", **{"class": "faint"})
    assert faint[0]["d"].count("M") == 3


def test_the_intervals_of_many_lines_are_whiskers():
    lines = tuple(Line((0, 1), (0.5, 0.6), (0.4, 0.5), (0.6, 0.7), series=i) for i in range(4))
    names = ("a", "b", "c", "d")
    parsed = charts(Panel("t", "x", "y", lines), series=names)
    whiskers = [a["d"] for a, _ in parsed.all("path", **{"class": "whiskers"})]
    assert len(whiskers) == 4
    assert not parsed.all("path", **{"class": "band"})
    assert len({path.split()[0] for path in whiskers}) == 4, "beside each other"
    assert [t for _, t in parsed.all("title")][1] == "a at 0: 0.5 [0.4, 0.6]"
    apart = tuple(dataclasses.replace(line, x=(i, i + 9)) for i, line in enumerate(lines))
    parsed = charts(Panel("t", "x", "y", apart), series=names)
    paths = {name: [a["d"] for a, _ in parsed.all("path", **{"class": name})] for name in ("whiskers", "line")}
    lines_drawn = [path for path in paths["line"] if "L" in path]  # others are of the legend
    across = [[re.findall(r"[ML]([0-9.]+) ", path) for path in drawn] for drawn in (paths["whiskers"], lines_drawn)]
    assert across[0] == across[1], "at their points, where they are alone"
    assert len(charts(Panel("t", "x", "y", lines[:3]), series=names).all("path", **{"class": "band"})) == 3
    alone = Panel("t", "x", "y", (Line((0,), (0.5,), (0.4,), (0.6,)),))
    assert charts(alone, series=names).all("path", **{"class": "whiskers"}), "the interval of one point is seen, too"
