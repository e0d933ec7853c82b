"""Multiple choice as data: MMLU's folder of CSV files, and any file with options."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.data.prompts import load_prompt
from rlvr_cli.data.traces import load_traces
from rlvr_cli.errors import RlvrError


@pytest.fixture
def folder(tmp_path):
    for split in ("dev", "val", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / f"virology_{split}.csv").write_text(
            f'"How many, ""in {split}""?",100,1,10,unknown,A\nTwo?,1,2,3,4,B\n'
        )
        (tmp_path / split / f"abstract_algebra_{split}.csv").write_text("Three?,1,2,3,4,C\nFour?,1,2,3,4,D\n")
    return tmp_path


def test_mmlu_is_read_as_it_was_released(folder):
    dataset = load_dataset(f"mmlu:{folder}", limit=2)
    assert [e.id for e in dataset.examples] == ["mmlu-test-abstract_algebra-1", "mmlu-test-virology-1"]
    assert dataset.examples[1].question == 'How many, "in test"?\nA. 100\nB. 1\nC. 10\nD. unknown'
    assert json.loads(dataset.examples[1].ground_truth) == {
        "answer": "A",
        "options": ["100", "1", "10", "unknown"],
        "subject": "virology",
    }
    assert json.loads(dataset.examples[0].ground_truth)["subject"] == "abstract algebra"
    assert dataset.default_grader == "multiple_choice"
    limit = csv.field_size_limit()
    assert len(load_dataset(f"mmlu:{folder}").examples) == 4
    assert csv.field_size_limit() == limit, "as it was before the files were read"
    assert '"in val"' in load_dataset(f"mmlu:{folder}", split="val").examples[1].question
    assert '"in dev"' in load_dataset(f"mmlu:{folder}", purpose="train").examples[1].question


def test_mmlu_as_traces(folder):
    traces = load_traces(f"mmlu:{folder}", load_prompt("alpaca"))
    assert [e.response for e in traces.examples] == [f"The correct answer is {letter}." for letter in "CADB"]


def test_a_folder_without_mmlu_is_an_error(folder):
    with pytest.raises(RlvrError, match=r"no file .*SUBJECT_test\.csv"):
        load_dataset(f"mmlu:{folder / 'test'}")
    with pytest.raises(RlvrError, match="no split 'train'"):
        load_dataset(f"mmlu:{folder}", split="train")
    (folder / "test" / "virology_test.csv").write_text("How many?,1,2\n")
    with pytest.raises(RlvrError, match=r"virology_test\.csv:1: row 1 has 3 cells"):
        load_dataset(f"mmlu:{folder}")


@pytest.mark.parametrize(("field", "answer"), [("options", "B"), ("choices", 1), ("options", "two")])
def test_any_file_with_options(tmp_path, field, answer):
    path = tmp_path / "quiz.jsonl"
    path.write_text(json.dumps({"question": "1+1?", field: ["one", "two", "three"], "answer": answer}) + "\n")
    dataset = load_dataset(str(path))
    assert dataset.examples[0].question == "1+1?\nA. one\nB. two\nC. three"
    assert json.loads(dataset.examples[0].ground_truth) == {"answer": "B", "options": ["one", "two", "three"]}
    assert dataset.default_grader == "multiple_choice"


def test_nulls_after_the_last_option_are_padding(tmp_path):
    path = tmp_path / "quiz.parquet"
    pq.write_table(pa.Table.from_pylist([{"question": "Q", "options": ["x", "y", None, None], "answer": "y"}]), path)
    (example,) = load_dataset(str(path)).examples
    assert example.question == "Q\nA. x\nB. y"


def test_a_right_option_in_another_field_is_named_by_an_option(tmp_path):
    path = tmp_path / "aqua.jsonl"
    path.write_text(json.dumps({"question": "Q", "options": ["x", "y"], "correct": "A"}) + "\n")
    with pytest.raises(RlvrError, match=r"no answer: looked for .*; the keys are question, options, correct") as raised:
        load_dataset(str(path))
    assert raised.value.hint.startswith("Name its field: --answer-field.")
    with pytest.raises(RlvrError, match="no answer: looked for right; the keys are"):
        load_dataset(str(path), answer_field="right")
    assert json.loads(load_dataset(str(path), answer_field="correct").examples[0].ground_truth)["answer"] == "A"


def quiz(tmp_path, options, answer):
    """The letter that a row is read as."""
    path = tmp_path / "quiz.jsonl"
    path.write_text(json.dumps({"question": "1+1?", "choices": options, "answer": answer}) + "\n")
    return json.loads(load_dataset(str(path)).examples[0].ground_truth)["answer"]


@pytest.mark.parametrize(
    ("options", "answer", "letter"),
    [
        (["8", "2", "24", "120"], 2, "C"),  # and not B, whose text is 2
        (["0", "4", "2", "6"], 1, "B"),
        (["12", "24", "36", "48"], "24", "B"),
        (["1", "0"], 1, "B"),
        ([12, 24, 36, 48], 24, "B"),
        ([5, 6, 2, 7], 2, "C"),  # both readings are C
        (["0", "4", "2", "6"], "4", "B"),
        (["0", "4", "2", "6"], "1", "B"),  # there is no such text
        (["O", "A", "B", "AB"], "B", "B"),  # a letter comes first, as in MMLU
    ],
)
def test_a_number_is_a_place_among_texts(tmp_path, options, answer, letter):
    assert quiz(tmp_path, options, answer) == letter


def test_a_number_is_never_a_text(tmp_path):
    with pytest.raises(RlvrError, match="the answer 24 names none of its 2 options") as raised:
        quiz(tmp_path, ["12", "24"], 24)
    assert "A number is a place, from 0: write texts in quotes, or give letters." in raised.value.hint


def test_a_number_of_parquet_is_a_place_among_texts(tmp_path):
    path = tmp_path / "quiz.parquet"
    row = {"question": "4!/3!/2?", "choices": ["8", "2", "24", "120"], "answer": 2}
    pq.write_table(pa.Table.from_pylist([row]), path)
    assert json.loads(load_dataset(str(path)).examples[0].ground_truth)["answer"] == "C"


@pytest.mark.parametrize(
    ("options", "answer", "named"),
    [
        (["8", "2", "24", "120"], "2", "'2' may be the option B or C"),
        ([8, 2, 24, 120], 2, "'2' may be the option B or C"),
        (["two", "two", "three"], "two", "'two' may be the option A or B"),
    ],
)
def test_an_answer_that_names_two_options_is_an_error(tmp_path, options, answer, named):
    with pytest.raises(RlvrError, match=named) as raised:
        quiz(tmp_path, options, answer)
    assert "Give the letter of the right one" in raised.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": "D"}, "the answer 'D' names none of its 3 options"),
        ({"answer": 3}, "the answer 3 names none"),
        ({"answer": "1" * 5000}, "names none of its 3 options"),
        ({"options": ["one"]}, "not a list of 2 to 10 options"),
        ({"options": "one"}, "not a list of 2 to 10 options"),
        ({"options": ["one", None, None]}, "not a list of 2 to 10 options"),
        ({"options": [None, "two", "three"]}, "its 'options' have a null before the last option"),
        ({"answer": None}, "no answer: its field answer is empty"),
    ],
)
def test_options_that_cannot_be_used_are_an_error(tmp_path, change, message):
    path = tmp_path / "quiz.jsonl"
    path.write_text(json.dumps({"question": "1+1?", "options": ["one", "two", "three"], "answer": "B"} | change) + "\n")
    with pytest.raises(RlvrError, match=message):
        load_dataset(str(path))
