"""Rows read from files, tested through `load_dataset`."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pages import limited_memory
from rlvr_cli.data import files
from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import Example

GOOD = b'{"question": "Q", "answer": "1"}'


def lines(tmp_path, *rows, name="data.jsonl") -> str:
    """A file of these rows: objects become JSON, bytes stay as they are, each ended by a newline."""
    path = tmp_path / name
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    return str(path)


def problem(spec, **options) -> RlvrError:
    with pytest.raises(RlvrError) as caught:
        load_dataset(spec, **options)
    return caught.value


# JSON lines


def test_a_cut_off_last_line(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD[:20])
    error = problem(str(path))
    assert f"{path}:2: not valid JSON" in error.problem
    assert "cut off" in error.hint
    path.write_bytes(GOOD + b"\n" + GOOD)  # no newline at the end is no fault
    assert load_dataset(str(path)).rows == 2


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r\n \r\n", b"\n\n\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_byte_order_mark_crlf_and_blank_lines_change_nothing(tmp_path, ending, mark):
    path = tmp_path / "data.jsonl"
    rows = [b'{"id": 1, "question": "Q\\r\\n", "answer": "1"}', b'{"id": 2, "question": "Q", "answer": "2"}']
    path.write_bytes(b"\n".join(rows))
    plain = load_dataset(str(path))
    path.write_bytes(mark + ending.join(rows) + ending)
    assert load_dataset(str(path)) == plain
    assert plain.examples[0].question == "Q\r\n"


def test_line_separators_inside_a_string_do_not_end_a_line(tmp_path):
    question = "a\u2028b\u2029c\x85d\x0b"
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"question": question, "answer": "1"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert load_dataset(str(path)).examples == [Example("data-1", question, "1")]


def test_a_lone_surrogate_becomes_text_that_can_be_stored(tmp_path):
    path = lines(tmp_path, b'{"question": "\\ud83d and \\ud83d\\ude00", "answer": "\\udc00", "id": "\\udfff"}')
    (example,) = load_dataset(path).examples
    assert example == Example("\\udfff", "\\ud83d and \U0001f600", "\\udc00")
    pa.array([example.id, example.question, example.ground_truth])  # raises on a lone surrogate


def test_a_line_that_is_too_long_is_skipped_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1000)
    for size in (1000, 1001, 2000, 5000):
        path = lines(tmp_path, GOOD, b'{"question": "' + b"x" * (size - 30) + b'", "answer": 1}'.rjust(16), GOOD)
        length = len(Path(path).read_bytes().split(b"\n")[1]) + 1
        dataset = load_dataset(path, skip_bad_lines=True)
        assert dataset.num_skipped == (length > 1000)
        assert dataset.examples[-1].id == "data-3"
    assert "longer than" in problem(path).problem


def test_a_long_line_is_allowed(tmp_path):
    question = "x" * 3_000_000
    assert load_dataset(lines(tmp_path, {"question": question, "answer": 1})).examples[0].question == question


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(content=st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.csv", "data.parquet", "data.jsonl.gz"])
def test_no_bytes_cause_a_traceback(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    for skip in (False, True):
        dataset = attempt(str(path), skip_bad_lines=skip, purpose="traces" if skip else "eval")
        assert str(path) in dataset.problem if isinstance(dataset, RlvrError) else dataset.rows > 0


def attempt(spec, **options):
    """The dataset, or the RlvrError of loading it; any other exception is a bug."""
    try:
        return load_dataset(spec, **options)
    except RlvrError as e:
        return e


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


json_keys = st.sampled_from(["id", "question", "Answer", "answer", "prompt", "response", "nums", "target"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(rows=st.lists(st.dictionaries(json_keys, json_values, max_size=5), min_size=1, max_size=4))
def test_every_row_is_read_or_counted(tmp_path, rows):
    dataset = attempt(lines(tmp_path, *rows), skip_bad_lines=True)
    if isinstance(dataset, RlvrError):
        assert f"none of its {len(rows)} rows" in dataset.problem
        return
    assert dataset.rows + dataset.num_skipped == len(rows)
    assert len({e.id for e in dataset.examples}) == dataset.rows
    for example in dataset.examples:
        "".join((example.id, example.question, example.ground_truth, example.prompt or "")).encode()


# Kinds of file

ROWS = [
    {"question": "1+1?", "answer": "2"},
    {"question": 'a "quoted", one\nover two lines', "answer": "#### 1,000"},
    {"question": "½ π", "answer": "\\boxed{3}"},
]
EXPECTED = [
    Example("data-1", "1+1?", "2"),
    Example("data-2", 'a "quoted", one\nover two lines', "1000"),
    Example("data-3", "½ π", "3"),
]


def write(tmp_path, suffix, rows) -> str:
    path = tmp_path / f"data{suffix}"
    match suffix:
        case ".jsonl.gz" | ".csv.gz":
            plain = write(tmp_path, suffix.removesuffix(".gz"), rows)
            path.write_bytes(gzip.compress(Path(plain).read_bytes()))
        case ".jsonl":
            return lines(tmp_path, *rows)
        case ".json":
            path.write_text(json.dumps(rows, indent=2))
        case ".csv":
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_every_kind_of_file_holds_the_same_examples(tmp_path, suffix):
    dataset = load_dataset(write(tmp_path, suffix, ROWS))
    assert dataset.examples == EXPECTED
    assert dataset.fingerprint == load_dataset(write(tmp_path, ".jsonl", ROWS)).fingerprint
    assert dataset.split is None


@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_missing_values_in_every_kind_of_file(tmp_path, suffix):
    path = write(tmp_path, suffix, [*ROWS, {"question": "Q", "answer": None}])
    error = problem(path)
    assert "no answer" in error.problem
    where = {".jsonl": ":4: ", ".json": ": item 4: ", ".csv": ":6: ", ".parquet": ": row 4: "}[
        suffix.removesuffix(".gz")
    ]
    assert error.problem.startswith(f"{path}{where}")  # the CSV's second row takes two lines
    dataset = load_dataset(path, skip_bad_lines=True)
    assert (dataset.examples, dataset.num_skipped) == (EXPECTED, 1)


def test_a_compressed_file_that_is_cut_off_or_none_is_named(tmp_path):
    path = Path(write(tmp_path, ".jsonl.gz", ROWS * 1000))
    path.write_bytes(path.read_bytes()[:-20])
    assert problem(str(path)).problem.startswith(f"Cannot read {path}: Compressed file ended")
    path.write_bytes(b"\x1f\x8b\x08\x00" + b"\xff" * 200)
    assert problem(str(path)).problem.startswith(f"Cannot read {path}: ")
    path.write_text('{"question": "plain", "answer": 1}')
    assert "Not a gzipped file" in problem(str(path)).problem


def test_a_compressed_file_of_a_folder_is_its_split(tmp_path):
    (tmp_path / "set").mkdir()
    plain = Path(write(tmp_path, ".jsonl", ROWS))
    (tmp_path / "set" / "test.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    dataset = load_dataset(str(tmp_path / "set"))
    assert ([example.id for example in dataset.examples][:1], dataset.split) == (["test-1"], "test")


def test_faults_of_a_json_array(tmp_path):
    path = tmp_path / "data.json"
    path.write_bytes(b'\xef\xbb\xbf [\n{"question": "Q", "answer": 1},\n{"question": "Q" "answer": 2}]')
    assert f"{path}:3: not valid JSON: Expecting ',' delimiter" in problem(str(path)).problem
    path.write_bytes(b'[{"question": "caf\xe9"}]')
    assert "byte 0xe9 at offset 18" in problem(str(path)).problem
    path.write_bytes(b"[1]")
    assert f"{path}: item 1: expected a JSON object" in problem(str(path)).problem
    path.write_bytes(b"[]")
    assert "there are no rows" in problem(str(path)).problem
    path.write_bytes(b"[" * 100_000)
    assert "nested too deeply" in problem(str(path)).problem
    path.write_bytes(b'[{"answer": 1, "answer": 1}]')
    assert "more than once" in problem(str(path)).problem


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (b"Q", "row 2 has 1 cells; the header has 2: question, answer."),
        (b"Q,1,2", "row 2 has 3 cells"),
        (b"caf\xe9,1", "byte 0xe9 in row 2 is not UTF-8"),
        (b'"Q"x,1', "row 2 is not valid CSV"),
        (b",1", "no question"),
    ],
)
def test_faults_of_a_csv_row(tmp_path, row, expected):
    path = tmp_path / "data.csv"
    path.write_bytes(b"\xef\xbb\xbfquestion,answer\r\n\r\nQ,1\r\n" + row + b"\r\nQ,3\r\n")
    error = problem(str(path))
    assert error.problem.startswith(f"{path}:4: ")
    assert expected in error.problem
    dataset = load_dataset(str(path), skip_bad_lines=True)
    assert [e.id for e in dataset.examples] == ["data-1", "data-3"]
    assert dataset.num_skipped == 1
    assert csv.field_size_limit() == 131_072  # the csv module's default is restored


def test_faults_of_a_csv_file(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes(b"question,question\nQ,1\n")
    assert "two columns have the same name" in problem(str(path)).problem
    path.write_bytes(b'"question"x,answer\nQ,1\n')
    assert "the header is not valid CSV" in problem(str(path)).problem
    path.write_bytes(b"question,answer\n" + b"x" * 1_000_000 + b",1\n")  # longer than csv's own limit
    assert len(load_dataset(str(path)).examples[0].question) == 1_000_000


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b'question,answer\nQ,1\n"Q,2\nQ,3\n', 3),
        (b'question,answer\nQ,1\n"Q,2\nQ,3', 3),
        (
            b'question,answer\r\nQ,1\r\n"Q\r\n""R""\r\n","2\r\nQ,3\r\n',
            5,
        ),  # opens in the last line of its row's first cell
        (b'question,answer\nQ"R,"2""\n""\nQ,3\n', 2),
        (b'question,answer\nQ,1\nQ,"', 3),
        (b'\nquestion,"answer\nQ,1\n', 2),
    ],
)
def test_a_quote_that_is_never_closed_is_an_error_of_the_file(tmp_path, text, line, skip):
    path = tmp_path / "data.csv"
    path.write_bytes(text)
    assert (
        problem(str(path), skip_bad_lines=skip).problem == f"{path}:{line}: the quote that opens here is never closed."
    )
    assert csv.field_size_limit() == 131_072


def test_types_of_a_parquet_file(tmp_path):
    from decimal import Decimal

    path = tmp_path / "data.parquet"
    for answers, truth in (
        (pa.array([2**62]), str(2**62)),
        (pa.array([0.1]), "0.1"),
        (pa.array([Decimal("1200.50")]), "1200.50"),
        (pa.array(["x"]).dictionary_encode(), "x"),
    ):
        pq.write_table(pa.table({"question": ["Q"], "answer": answers}), path)
        assert load_dataset(str(path)).examples == [Example("data-1", "Q", truth)]
    for answers, kind in (
        (pa.array([["x"]]), "a list"),
        (pa.array([{"x": 1}]), "an object"),
        (pa.array([True]), "a truth value"),
        (pa.array([float("nan")]), "nan"),
        (pa.array([b"x"]), "bytes"),
        (pa.array([0], pa.date32()), "a date or a time"),
    ):
        pq.write_table(pa.table({"question": ["Q"], "answer": answers}), path)
        assert f"{path}: row 1: 'answer' should be text or a number; it is {kind}." in problem(str(path)).problem


@pytest.mark.parametrize(
    ("far", "kind"),
    [
        (10**9, pa.date32()),
        (10**18, pa.timestamp("us")),
        (1, pa.timestamp("ns")),
        (1, pa.duration("ns")),
        (1, pa.time64("ns")),
    ],
)
def test_dates_and_times_beside_what_is_read_may_be_any(tmp_path, far, kind):
    columns = {"made": pa.array([far, None], kind), "question": ["P", "Q"], "answer": ["1", "2"]}
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    dataset = load_dataset(str(tmp_path / "data.parquet"))
    assert dataset.examples == [Example("data-1", "P", "1"), Example("data-2", "Q", "2")]


def test_values_of_a_parquet_file_that_python_cannot_hold(tmp_path):
    path = tmp_path / "data.parquet"
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    far = pa.array([[10**18]], pa.list_(pa.timestamp("us")))
    for column, said in ((twice, "duplicate field names"), (far, "date value out of range")):
        pq.write_table(pa.table({"question": ["Q"], "answer": ["1"], "other": column}), path)
        error = problem(str(path), skip_bad_lines=True)
        assert error.problem.startswith(f"{path} has values that cannot be read: ")
        assert said in error.problem
        assert error.hint == "Leave out the column that has them."


def test_faults_of_a_parquet_file(tmp_path):
    path = Path(write(tmp_path, ".parquet", ROWS * 1000))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert "not a readable Parquet file" in problem(str(path)).problem
    pq.write_table(pa.table([["Q"], ["R"]], names=["question", "question"]), path)
    assert "two columns have the same name" in problem(str(path)).problem
    bad = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xe9\xe9")])
    pq.write_table(pa.table({"question": bad, "answer": ["1"]}), path)
    assert "not a readable Parquet file" in problem(str(path)).problem


def test_a_flipped_byte_in_a_checksummed_parquet_page_is_found(tmp_path):
    path = tmp_path / "data.parquet"
    table = pa.table({"question": [f"question {i}" for i in range(500)], "answer": ["1"] * 500})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[content.index(b"question 77")] ^= 1
    path.write_bytes(content)
    assert "checksum" in problem(str(path)).problem.lower()


def test_short_memory_is_not_called_an_unreadable_file(tmp_path):
    with (tmp_path / "p.parquet").open("wb") as file:
        file.write(b"PAR1")
        file.seek(1 << 31)
        file.write(((1 << 31) - 4).to_bytes(4, "little") + b"PAR1")  # the length of its footer
    with limited_memory(1 << 28), pytest.raises(RlvrError, match="refused memory or a thread"):
        list(files.file_rows(tmp_path / "p.parquet", like=""))
