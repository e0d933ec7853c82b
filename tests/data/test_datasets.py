import hashlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_cli.data.datasets import dataset_names, load_dataset, recipe
from rlvr_cli.data.examples import final_answer
from rlvr_cli.data.synthetic import arithmetic, countdown
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import Example

traces = partial(load_dataset, purpose="traces")

ROOT = Path(__file__).parents[2]


def lines(tmp_path, *rows, name="data.jsonl") -> str:
    """A file of these rows: objects become JSON, bytes stay as they are, each ended by a newline."""
    path = tmp_path / name
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    return str(path)


def problem(spec, **options) -> RlvrError:
    with pytest.raises(RlvrError) as caught:
        load_dataset(spec, **options)
    return caught.value


# Names


def test_the_committed_files_are_what_the_generators_make():
    location = ROOT / "datasets" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate", location)
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert sorted(generate.FILES) == sorted(path.name for path in (ROOT / "datasets").glob("*.jsonl"))
    for name in generate.FILES:
        assert (ROOT / "datasets" / name).read_bytes() == generate.content(name), name


@pytest.mark.parametrize(
    ("name", "make", "train", "grader"),
    [("arithmetic", arithmetic, 2000, None), ("countdown", countdown, 1000, "countdown")],
)
def test_the_fixed_files_are_the_generators_at_seed_0(name, make, train, grader):
    validation = load_dataset(name)
    assert (validation.name, validation.split, validation.rows) == (name, "validation", 256)
    assert validation.examples == make(256, split="validation")
    assert validation.default_grader == grader
    assert validation.license == "Apache-2.0"
    assert load_dataset(name, purpose="train").examples == make(train)
    generated = load_dataset(f"{name}:{train}", split="train")
    assert generated.fingerprint == load_dataset(name, split="train").fingerprint
    assert generated.default_grader == grader


def test_generated_sizes_seeds_and_splits():
    assert load_dataset("arithmetic:300:7", split="train").examples == arithmetic(300, seed=7)
    assert load_dataset("arithmetic:300", purpose="train", seed=7).examples == arithmetic(300, seed=7)
    assert load_dataset("arithmetic:300:7", purpose="train", seed=1).examples == arithmetic(300, seed=7)
    assert load_dataset("arithmetic:40").examples == arithmetic(40, split="validation")
    assert traces("countdown:40").examples == countdown(40)
    few = load_dataset("arithmetic:300:7", limit=5)
    assert few.examples == arithmetic(5, seed=7, split="validation")
    assert few.name == "arithmetic:300:7"
    assert few.notes == []


@pytest.mark.parametrize("numbers", ["", "0", "-1", "1e3", "5:x", "5:1:2", "9" * 5000])
def test_invalid_generated_specs(numbers):
    assert "arithmetic:8000:7" in problem(f"arithmetic:{numbers}").hint


def test_invalid_dataset_names():
    error = problem("gsm9k")
    assert "no dataset 'gsm9k'" in error.problem
    assert "Did you mean 'gsm8k'?" in error.hint
    assert "arithmetic, countdown, gsm8k, math" in error.hint
    assert "arithmetic, countdown" in problem("math:100").hint  # not generated
    assert "There is no file missing/file.jsonl" in problem("missing/file.jsonl").problem
    assert "no split 'test'" in problem("arithmetic", split="test").problem
    assert "no split 'test'" in problem("arithmetic:5", split="test").problem
    assert "fields" in problem("arithmetic:5", answer_field="x").problem
    assert "Cannot read" in problem("x" * 5000).problem
    problem("a\0b")
    problem("hf:")
    assert "leaves no examples" in problem("arithmetic", limit=0).problem


def test_every_recipe_is_complete():
    assert dataset_names() == ["arithmetic", "countdown", "gsm8k", "math", "multiplication"]
    for name in dataset_names():
        made_from = recipe(name)
        assert made_from.source
        assert made_from.license
        assert bool(made_from.files) != bool(made_from.hub)
        if made_from.files:
            assert {made_from.training_split, made_from.evaluation_split} <= set(made_from.files)


# Fields


@pytest.mark.parametrize(
    ("row", "question", "truth"),
    [
        ({"question": "1+1?", "answer": "so\n#### 2"}, "1+1?", "2"),  # GSM8K
        ({"question": "1+1?", "answer": "#### 1,234,567"}, "1+1?", "1234567"),
        ({"problem": "P", "level": "Level 1", "solution": r"thus \boxed{\frac{1}{2}}."}, "P", r"\frac{1}{2}"),  # MATH
        ({"problem": "P", "solution": r"long \boxed{7}", "answer": "7.0"}, "P", "7.0"),  # MATH-500
        ({"Problem": "P", "Solution": "s", "Answer": 204}, "P", "204"),  # AIME
        ({"prompt": "P", "ground_truth": "5", "answer": "6"}, "P", "5"),
        ({"input": "P", "target": "x"}, "P", "x"),
        ({"prompt": "no", "question": "Q", "answer": 1.50}, "Q", "1.5"),
        ({"question": " Q\n", "answer": " 3 \n"}, " Q\n", "3"),  # a question is kept as it is
    ],
)  # fmt: skip
def test_fields_are_found_by_name(tmp_path, row, question, truth):
    assert load_dataset(lines(tmp_path, row)).examples == [Example("data-1", question, truth)]


def test_fields_named_by_options(tmp_path):
    path = lines(tmp_path, {"question": "Q", "answer": "A", "q2": "Q2", "a2": r"\boxed{A2}"})
    assert load_dataset(path, question_field="q2", answer_field="a2").examples == [Example("data-1", "Q2", "A2")]
    assert load_dataset(path, question_field="", answer_field="").examples == [Example("data-1", "Q", "A")]
    assert "looked for nope; the keys are question, answer, q2, a2" in problem(path, answer_field="nope").problem
    assert "looked for nope; the keys are question, answer, q2, a2" in problem(path, question_field="nope").problem


def test_the_first_row_fixes_the_fields(tmp_path):
    others = {"question": "Q", "solution": "2"}, {"prompt": "P", "answer": "3"}
    path = lines(tmp_path, {"question": "Q", "answer": "1"}, *others)
    assert f"{path}:2: no answer: looked for answer; the keys are question, solution." in problem(path).problem
    dataset = load_dataset(path, skip_bad_lines=True)
    assert [e.ground_truth for e in dataset.examples] == ["1"]
    assert dataset.num_skipped == 2


def test_numbers_stay_as_they_are_written(tmp_path):
    huge = b"7" * 5000  # int() refuses more than 4,300 digits
    written = [huge, b"-0.50", b"1e3", b"12345678901234567890123", b"1E400", b"0"]
    path = lines(tmp_path, *(b'{"question": "Q", "answer": ' + number + b"}" for number in written))
    assert [e.ground_truth for e in load_dataset(path).examples] == [number.decode() for number in written]


def test_ids(tmp_path):
    rows = [{"id": 7}, {"id": "a/b"}, {}, {"id": None, "unique_id": "test/algebra/1.json"}, {"id": ""}]
    path = lines(tmp_path, *({"question": "Q", "answer": "1", **row} for row in rows))
    assert [e.id for e in load_dataset(path).examples] == ["7", "a/b", "data-3", "test/algebra/1.json", "data-5"]


def test_duplicate_ids_name_both_lines(tmp_path):
    path = lines(tmp_path, *({"question": "Q", "answer": "1", "id": i} for i in ("a", "b", "a")))
    assert f"{path}:3: the id a is taken: {path}:1 has it too." in problem(path).problem


def test_rows_of_a_countdown_dataset_from_the_hub(tmp_path):
    dataset = load_dataset(lines(tmp_path, {"target": 98, "nums": [44, 19, 35]}))
    assert json.loads(dataset.examples[0].ground_truth) == {"numbers": [44, 19, 35], "target": 98}
    assert "[44, 19, 35]" in dataset.examples[0].question
    assert dataset.default_grader == "countdown"
    for nums in ([], [1.5], ["x"], "12", [[1]]):
        assert "list of integers" in problem(lines(tmp_path, {"target": 98, "nums": nums})).problem
    assert load_dataset(lines(tmp_path, {"question": "Q", "answer": 1})).default_grader is None
    mixed = load_dataset(lines(tmp_path, {"target": 98, "nums": [44, 19, 35]}, {"question": "Q", "answer": 1}))
    assert (mixed.rows, mixed.default_grader) == (2, None)
    assert mixed.mixed == "1 of 2 rows are Countdown puzzles"


@pytest.mark.parametrize(
    ("row", "grader"),
    [
        ({"nums": [1, 2, 3], "target": 6}, "countdown"),
        ({"question": "Q", "options": ["x", "y"], "answer": "A"}, "multiple_choice"),
        ({"question": "Q", "answer": "#### 1"}, None),
    ],
)
def test_a_row_that_is_left_out_counts_as_none_of_its_kind(tmp_path, row, grader):
    rows = [{"id": i, **row} for i in (1, 2, 1)] + [{**row, "question": "", "id": 3}] * ("options" in row)
    path = lines(tmp_path, *rows, {"id": 2, "question": "Q", "answer": "whole"})
    dataset = load_dataset(path, skip_bad_lines=True)
    assert (dataset.rows, dataset.num_skipped) == (2, len(rows) - 1)
    assert (dataset.default_grader, dataset.mixed, dataset.notes) == (grader, "", [])


# Traces


def test_the_handouts_sft_file(tmp_path):
    prompt, response = "User: 1+1?\nAssistant: <think>", " 2 </think> <answer> 2 </answer>"
    row = {"prompt": prompt, "response": response}
    path = lines(tmp_path, {**row, "ground_truth": 2}, row)
    first = Example("data-1", question=prompt, ground_truth="2", prompt=prompt, response=response)
    dataset = traces(path)
    assert dataset.examples[0] == first
    assert [e.ground_truth for e in dataset.examples] == ["2", ""]
    assert f"{path}:2: no answer" in problem(path).problem  # evaluation needs a ground truth, SFT does not
    assert load_dataset(path, limit=1).examples == [first]
    unanswered = lines(tmp_path, {**row, "response": None, "ground_truth": 2})  # the prompt stays formatted
    assert load_dataset(unanswered).examples == [Example("data-1", prompt, "2", prompt=prompt)]


def test_a_question_beside_a_formatted_prompt(tmp_path):
    row = {"question": "1+1?", "prompt": "User: 1+1?", "completion": " 2", "answer": "2"}
    assert traces(lines(tmp_path, row)).examples == [Example("data-1", "1+1?", "2", "User: 1+1?", " 2")]
    empty = traces(lines(tmp_path, {**row, "prompt": ""})).examples  # counts as none: the template is filled
    assert empty == [Example("data-1", "1+1?", "2", None, " 2")]
    for cased in (row, {key.title(): value for key, value in row.items()}):
        path = lines(tmp_path, cased)
        (prompt,) = {"prompt", "Prompt"} & {*cased}
        assert traces(path).examples == [Example("data-1", "1+1?", "2", "User: 1+1?", " 2")]
        raw = traces(path, question_field=prompt).examples  # the option says: not formatted
        assert raw == [Example("data-1", "User: 1+1?", "2", None, " 2")]


def test_a_trace_needs_a_response(tmp_path):
    path = lines(tmp_path, {"question": "Q", "answer": "#### 1"})
    with pytest.raises(RlvrError, match=r"no response to train on.*the keys are question, answer"):
        traces(path)
    with pytest.raises(RlvrError, match="no response"):
        traces(lines(tmp_path, {"prompt": "Q", "response": "  "}))
    with pytest.raises(RlvrError, match="no response"):  # and not that an answer is no text
        traces(lines(tmp_path, {"question": "Q", "answer": "7", "solution": "plain", "target": {"a": 1}}))
    assert traces("arithmetic", limit=3).examples == arithmetic(3)


def test_an_empty_response_is_none_as_a_null_is(tmp_path):
    row = {"question": "Q", "answer": "work #### 5"}
    for empty in ("", None):
        (example,) = traces(lines(tmp_path, {**row, "response": empty, "options": empty})).examples
        assert (example.response, example.solution) == (None, "work")
    assert traces(lines(tmp_path, {**row, "response": "", "completion": " 5"})).examples[0].response == " 5"


# Final answers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16 - 3 = 13\n#### 18", ("####", "18")),
        ("9 * 2 = 18 #### 18\n\n", ("####", "18")),
        ("#### -1,450,000", ("####", "-1450000")),
        ("#### $1,080.50", ("####", "$1080.50")),
        ("#### 1, 2", ("####", "1, 2")),  # a list, not thousands
        ("#### 1,2", ("####", "1,2")),
        ("#### 3\n#### 4", ("####", "4")),
        ("#### Step 1\nthe rest \\boxed{5}", ("boxed", "5")),  # a heading
        ("####", ("####", "")),
        ("a \\boxed{1} b \\boxed{\\frac{1}{2}}", ("boxed", "\\frac{1}{2}")),
        ("\\boxed{\\{1,2\\}}", ("boxed", "\\{1,2\\}")),
        ("\\boxed{[0,1\\}} x", ("boxed", "[0,1\\}")),
        ("\\boxed{x=\\boxed{5}}", ("boxed", "5")),
        ("\\fbox{ 3 }", ("boxed", "3")),
        ("\\boxed{1} and \\boxed{2", ("boxed", "1")),  # the last one that closes
        ("$\\boxed 5$.", ("boxed", "5")),
        ("\\boxed3.5, so", ("boxed", "3.5")),
        ("\\boxed{5", ("boxed", "")),
        ("\\boxed\\frac{1}{2}", ("boxed", "")),  # not read as \frac
        ("\\boxed{a\\\\b}", ("boxed", "a\\\\b")),
        ("\\boxedsomething", ("whole", "\\boxedsomething")),
        (" 3/4 ", ("whole", "3/4")),
        ("assert that 9 * 2 = 18\n#### 18", ("####", "18")),
        ("We\nassert (by symmetry) x = 5, so \\boxed{5}", ("boxed", "5")),
    ],
)
def test_final_answers(text, expected):
    assert final_answer(text) == expected


@pytest.mark.parametrize(
    "tests",
    [
        json.dumps([{"input": "2\n####\n#..#\n", "output": "6"}]),
        json.dumps([{"input": "5", "output": "\\boxed{5}"}]),
        json.dumps({"grid": "####"}),
        "assert f(4) == '####'",
        "import re\nassert(f('a #### b'))",
        'assert boxed(5) == "\\\\boxed{5}"\n# ####',
    ],
)
def test_marks_inside_of_unit_tests_and_json_are_none(tests):
    assert final_answer(tests) == ("whole", tests)


balanced = st.recursive(
    st.text("ab1 \\", max_size=3).map(lambda text: text.replace("\\", "\\{")),
    lambda inner: inner.map("{{{}}}".format) | st.tuples(inner, inner).map("".join),
    max_leaves=8,
)


@given(balanced)
def test_a_box_gives_back_what_was_put_in(content):
    assert final_answer(f"so \\boxed{{{content}}} is it") == ("boxed", content.strip())


def test_an_unreadable_mark_is_a_bad_row(tmp_path):
    path = lines(tmp_path, {"question": "Q", "answer": "so\n####"}, {"question": "Q", "answer": "\\boxed{5"})
    assert f"{path}:1: the answer in 'answer' has a #### mark with nothing after it." in problem(path).problem
    assert load_error_count(path) == 2


def load_error_count(path: str) -> int:
    with open(path, "ab") as file:
        file.write(b'{"question": "Q", "answer": "1"}\n')
    return load_dataset(path, skip_bad_lines=True).num_skipped


def test_a_note_says_that_answers_are_of_mixed_form(tmp_path):
    path = lines(tmp_path, *({"question": "Q", "answer": a} for a in ("#### 1", "2", "so \\boxed{3}", "4")))
    dataset = load_dataset(path)
    assert [e.ground_truth for e in dataset.examples] == ["1", "2", "3", "4"]
    assert dataset.notes == [
        f"2 of 4 answers have neither #### nor \\boxed and were taken whole; the first is {path}:2."
    ]
    assert load_dataset(lines(tmp_path, {"question": "Q", "answer": "1"})).notes == []


# Bad lines

GOOD = b'{"question": "Q", "answer": "1"}'


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"question": "Q"}', "no answer: looked for answer; the keys are question."),
        (b'{"answer": "1"}', "no question: looked for question; the keys are answer."),
        (b'{"question": "Q", "answer": null}', "no answer"),
        (b'{"question": " ", "answer": "1"}', "no question"),
        (b"{}", "the keys are none"),
        (b'{"question": "Q", "ans', "not valid JSON: Unterminated string starting at column 19"),
        (b'{"question": "Q", "answer": 1}}', "not valid JSON: Extra data"),
        (b'{"question": "Q\t", "answer": 1}', "not valid JSON: Invalid control character"),
        (b'{"question": "caf\xe9", "answer": 1}', "byte 0xe9 at column 18 is not UTF-8"),
        (b"\xef\xbb\xbf" + GOOD, "not valid JSON"),  # a byte order mark belongs to the file's start only
        (b'{"question": ["Q"], "answer": 1}', "'question' should be text or a number; it is a list"),
        (b'{"question": "Q", "answer": {"value": 1}}', "'answer' should be text or a number; it is an object"),
        (b'{"question": "Q", "answer": true}', "it is a truth value"),
        (b'{"question": "Q", "answer": NaN}', "it is nan"),
        (b'{"question": "Q", "answer": -Infinity}', "it is -inf"),
        (b'{"question": "Q", "answer": 1, "answer": 2}', "the key answer occurs more than once"),
        (b'{"question": "Q", "answer": 1, "id": []}', "'id' should be text or a number"),
        (b'[{"question": "Q", "answer": 1}]', "expected a JSON object"),
        (b"null", "found null"),
        (b"17", "found text or a number"),
        (b'{"question": "Q", "answer": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b"\0", "not valid JSON"),
    ],
)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path, line, expected):
    for name in ("data.jsonl", "data.json"):
        path = lines(tmp_path, GOOD, b"", line, GOOD, name=name)
        error = problem(path)
        assert error.problem.startswith(f"{path}:3: ")
        assert expected in error.problem
        assert "--skip-bad-lines" in error.hint
        dataset = load_dataset(path, skip_bad_lines=True)
        assert [e.id for e in dataset.examples] == ["data-1", "data-4"]
        assert dataset.num_skipped == 1
        assert len(dataset.skipped) == 1
        assert dataset.skipped[0].startswith(f"{path}:3: ")


def test_a_bad_first_line_lists_what_was_looked_for_and_found(tmp_path):
    error = problem(lines(tmp_path, {"frage": "Q", "antwort": "A"}))
    assert "data.jsonl:1: no question: looked for question, problem, prompt, " in error.problem
    assert error.problem.endswith("the keys are frage, antwort.")
    assert "--question-field" in error.hint
    many = problem(lines(tmp_path, {"k" * 100: 1, **{f"key{i}": i for i in range(50)}}))
    assert "and 39 more" in many.problem
    assert len(many.problem) < 500


def test_many_bad_lines_are_counted_and_the_first_few_listed(tmp_path):
    path = lines(tmp_path, GOOD, *[b"?"] * 1000)
    dataset = load_dataset(path, skip_bad_lines=True)
    assert dataset.num_skipped == 1000
    assert [message.split(" ")[0] for message in dataset.skipped] == [f"{path}:{n}:" for n in range(2, 7)] + ["and"]
    assert dataset.skipped[-1] == "and 995 more"
    assert "none of its 3 rows can be used" in problem(lines(tmp_path, b"?", b"?", b"?"), skip_bad_lines=True).problem


@pytest.mark.parametrize("content", [b"", b"\n\r\n \n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.csv"])
def test_a_file_without_rows(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    assert "there are no rows in it" in problem(str(tmp_path / name)).problem


# Places, splits, limits


def test_directories_have_splits_and_files_do_not(tmp_path):
    path = lines(tmp_path, GOOD)
    assert "it has no split 'test'" in problem(path, split="test").problem
    for split, answer in (("train", "1"), ("test", "2")):
        lines(tmp_path, {"question": "Q", "answer": answer}, name=f"{split}.jsonl")
    (tmp_path / "notes.txt").write_text("no data")
    directory = str(tmp_path)
    test = load_dataset(directory)
    assert (test.split, test.examples) == ("test", [Example("test-1", "Q", "2")])
    assert load_dataset(directory, purpose="train").examples == [Example("train-1", "Q", "1")]
    lines(tmp_path, {"question": "Q", "answer": "3"}, name="validation.jsonl")
    assert load_dataset(directory).split == "validation"
    assert load_dataset(directory, split="test") == test
    error = problem(directory, split="dev")
    assert "no file for the split dev" in error.problem
    assert "data, test, train, validation" in error.hint
    lines(tmp_path, b"question,answer", b"Q,1", name="data.csv")
    assert "several files for data" in problem(directory, split="data").problem


def test_directories_that_are_not_datasets(tmp_path):
    assert "train.jsonl" in problem(str(tmp_path)).hint
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    assert f"rlvr sft --dataset {run}" in problem(str(run)).hint


def test_a_file_of_unknown_kind(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("x")
    assert ".jsonl, .json, .csv, .parquet" in problem(str(path)).hint
    (tmp_path / "data.JSONL").write_bytes(GOOD)
    assert load_dataset(str(tmp_path / "data.JSONL")).rows == 1


def test_limit(tmp_path):
    path = lines(tmp_path, GOOD, b"?", GOOD, b"?")
    assert load_dataset(path, limit=1).rows == 1  # what comes after is not read
    dataset = load_dataset(path, limit=2, skip_bad_lines=True)
    assert (dataset.rows, dataset.num_skipped, dataset.notes) == (2, 1, [])
    dataset = load_dataset(path, limit=5000, skip_bad_lines=True)
    assert (dataset.rows, dataset.num_skipped) == (2, 2)
    assert dataset.too_few == f"{path} has only 2 of the 5,000 examples asked for."
    assert load_dataset("arithmetic", limit=7).examples == load_dataset("arithmetic").examples[:7]
    assert load_dataset("arithmetic:5", limit=7).too_few == "arithmetic:5 has only 5 of the 7 examples asked for."
    assert load_dataset("arithmetic:5", limit=5).too_few == ""


def test_a_list_of_inputs_and_outputs_is_unit_tests_and_no_other_list_is_an_answer(tmp_path):
    cases = [{"input": "1 2\n", "output": "3"}, {"input": "é", "output": "6"}]
    path = lines(tmp_path, {"question": "Q", "answer": cases}, {"question": "P", "answer": json.dumps(cases)})
    first, second = load_dataset(path).examples
    assert json.loads(first.ground_truth) == json.loads(second.ground_truth) == cases
    for other in ([1, 2], ["Rome", "Roma"], [{"input": 1, "output": 2}], [], {"input": "1", "output": "2"}):
        error = problem(lines(tmp_path, {"question": "Q", "answer": other}))
        assert "'answer' should be text or a number" in error.problem
        assert "write it as JSON text" in error.hint


def test_the_fingerprint_depends_on_content_and_order(tmp_path):
    rows = [{"id": i, "question": f"Q{i}", "answer": i} for i in range(3)]
    expected = hashlib.sha256(
        b'["0", "Q0", "0", null, null]\n["1", "Q1", "1", null, null]\n["2", "Q2", "2", null, null]\n'
    ).hexdigest()
    changed = [rows[:2], rows[::-1]]
    changed += [[*rows[:2], {**rows[2], key: "x"}] for key in ("id", "question", "answer", "response")]
    prints = [load_dataset(lines(tmp_path, *r)).fingerprint for r in changed]
    assert len({expected, *prints}) == 7
    more = [{**row, "level": 1} for row in rows]
    assert load_dataset(lines(tmp_path, *more, name="other.jsonl")).fingerprint == expected


def test_a_file_name_that_is_not_utf8(tmp_path):
    try:
        path = os.fsdecode(os.fsencode(str(tmp_path)) + b"/caf\xe9.jsonl")
        Path(path).write_bytes(GOOD)
    except OSError:
        pytest.skip("this file system takes only UTF-8 names")
    dataset = load_dataset(path)
    assert dataset.examples[0].id == "caf\\udce9-1"
    json.dumps([dataset.name, dataset.source], ensure_ascii=False).encode()


# The hub: real fetches of local folders, since `datasets` takes those by the same call


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A directory that stands in for the hub; Hugging Face `datasets` is kept offline and out of the home directory."""
    pytest.importorskip("datasets.exceptions", reason="Hugging Face datasets is not installed (the extra `hub`)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def put(hub, name, config, split, rows):
    folder = hub / name / config
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    card = "---\nconfigs:\n"
    for directory in sorted(path for path in (hub / name).iterdir() if path.is_dir()):
        card += f"- config_name: {directory.name}\n  data_files:\n"
        card += "".join(f"  - split: {p.stem}\n    path: {directory.name}/{p.name}\n" for p in directory.iterdir())
    (hub / name / "README.md").write_text(f"{card}---\n")


def test_gsm8k_from_the_hub(hub):
    put(hub, "openai/gsm8k", "main", "test", [{"question": "Q", "answer": "so <<1+1=2>>2\n#### 1,002"}])
    put(hub, "openai/gsm8k", "main", "train", [{"question": "T", "answer": "#### 3"}, {"question": "U", "answer": "4"}])
    dataset = load_dataset("gsm8k")
    assert dataset.examples == [Example("gsm8k-test-1", "Q", "1002")]
    assert (dataset.split, dataset.license) == ("test", "MIT")
    assert "row 2: the answer in 'answer' has no #### mark" in problem("gsm8k", purpose="train").problem
    assert load_dataset("gsm8k", split="train", limit=1).examples[0].ground_truth == "3"


def test_math_from_the_hub_takes_turns_through_the_subjects(hub):
    subjects = recipe("math").hub["configs"]
    for n, subject in enumerate(subjects):
        rows = [{"problem": f"{subject} {i}", "type": subject, "solution": f"$\\boxed{{{i}}}$"} for i in range(n + 1)]
        put(hub, "EleutherAI/hendrycks_math", subject, "test", rows)
    dataset = load_dataset("math")
    assert dataset.rows == sum(range(1, 8))
    assert [e.question for e in dataset.examples[:8]] == [f"{s} 0" for s in subjects] + [f"{subjects[1]} 1"]
    assert dataset.examples[0] == Example("math-test-algebra-1", "algebra 0", "0")
    assert load_dataset("math", limit=7).examples == dataset.examples[:7]


def test_any_dataset_of_the_hub(hub):
    put(hub, "org/name", "one", "test", [{"nums": [1, 2, 30], "target": 33}])
    put(hub, "org/name", "two", "test", [{"problem": "P", "final_answer": 5}])
    assert load_dataset("hf:org/name:two").examples == [Example("name-test-1", "P", "5")]
    assert load_dataset("hf:org/name:one").default_grader == "countdown"
    said = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "name": None}]
    put(hub, "org/said", "one", "train", [{"messages": said}])
    (example,) = load_dataset("hf:org/said:one", purpose="traces").examples
    assert example.conversation is not None
    assert "name" not in example.conversation.messages[1], "a null stands for what other rows have"
    error = problem("hf:org/name")
    assert "one" in error.problem
    assert "two" in error.problem
    assert "split 'train'" in problem("hf:org/name:two", purpose="train").problem


def test_without_a_network_the_hub_is_an_error_the_user_can_read(hub):
    error = problem("hf:no/such")
    assert "Cannot get the split 'test' of no/such" in error.problem
    assert "path of a file" in error.hint


def test_a_dataset_that_is_a_script_is_an_error_that_names_what_to_take(hub):
    (hub / "org/script").mkdir(parents=True)
    (hub / "org/script/script.py").write_text("")
    error = problem("hf:org/script")
    assert "Dataset scripts are no longer supported" in error.problem
    assert "another copy of the dataset" in error.hint
    assert "Parquet files" in error.hint


def test_a_row_that_cannot_be_decoded_is_an_error_the_user_can_read(hub):
    put(hub, "org/name", "one", "test", [{"question": "Q", "answer": "5", "image": {"bytes": b"none", "path": ""}}])
    path = hub / "org/name/one/test.parquet"
    table, kinds = pq.read_table(path), {"image": {"_type": "Image"}}
    kinds |= {name: {"_type": "Value", "dtype": "string"} for name in ("question", "answer")}
    features = json.dumps({"info": {"features": kinds}})
    pq.write_table(table.replace_schema_metadata({"huggingface": features}), path)
    assert "Cannot get the split 'test' of org/name (one)" in problem("hf:org/name:one").problem


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_said_at_once(tmp_path):
    pytest.importorskip("datasets.exceptions", reason="Hugging Face datasets is not installed (the extra `hub`)")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"  # of nobody, once it is closed
    nowhere = {
        "HF_HUB_OFFLINE": "0",
        "HF_DATASETS_OFFLINE": "0",
        "HF_ENDPOINT": address,
        "HF_HOME": str(tmp_path / "hf"),
    }
    command = [sys.executable, "-m", "rlvr_cli", "eval", "--dataset", "gsm8k", "--check-dataset"]
    done = subprocess.run(command, env=os.environ | nowhere, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    problem, hint = done.stderr.splitlines()
    assert (
        f"Cannot get the split 'test' of openai/gsm8k (main) from the Hugging Face hub: {address} cannot be reached"
        in problem
    )
    assert "its cache does not have it" in problem
    assert "path of a file" in hint


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install -e '.[hub]'" in problem("gsm8k").hint
    assert "pip install -e '.[hub]'" in problem("hf:org/name").hint


def test_reading_a_file_imports_nothing_heavy(tmp_path):
    code = (
        "import sys; from rlvr_cli.data.datasets import load_dataset as load; load(sys.argv[1]); load('countdown:9');"
    )
    code += "print([m for m in ('pyarrow', 'datasets', 'torch', 'transformers', 'numpy') if m in sys.modules])"
    command = [sys.executable, "-c", code, lines(tmp_path, GOOD)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_of_a_million_questions_few_are_in_memory(tmp_path, monkeypatch):
    import gc

    path = tmp_path / "many.jsonl"
    path.write_text("".join(f'{{"question": "What is {i} + 0?", "answer": {i}}}\n' for i in range(500)))
    whole = load_dataset(str(path))
    monkeypatch.setattr("rlvr_cli.runs.storage.spilled.IN_MEMORY", 20)
    gc.collect()
    before = sum(type(o) is Example for o in gc.get_objects())
    kept = load_dataset(str(path))
    assert sum(type(o) is Example for o in gc.get_objects()) - before <= 25
    assert (kept.rows, kept.fingerprint, kept.default_grader) == (500, whole.fingerprint, whole.default_grader)
    assert list(kept.examples) == whole.examples
    assert load_dataset(str(path), limit=30).examples[-1] == whole.examples[29]
    with path.open("a") as file:
        file.write('{"question": "again", "answer": 1, "id": "many-3"}\n')
    with pytest.raises(RlvrError, match=r"many\.jsonl:501: the id many-3 is taken: .*many\.jsonl:3 has it too"):
        load_dataset(str(path))
