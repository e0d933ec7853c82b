r"""A dataset's name or path becomes a list of `Example`s.

Enters: ``arithmetic``, ``countdown``, ``gsm8k`` or ``math`` (recipes in datasets/NAME.toml); the first two also as
``NAME:SIZE[:SEED]``, generated; ``hf:ORG/NAME[:CONFIG]`` from the hub; a .jsonl, .json, .csv or .parquet file; a
directory of such files, one per split. Leaves: examples whose texts UTF-8 can hold (a lone surrogate is escaped), with
the SHA-256 of their content. A row that cannot be used is reported as FILE:LINE with the keys found; none is lost
silently.

How a row is read, unless an option names the field:

- question: the first of `QUESTION_FIELDS` that the file has. With a response beside it, ``prompt`` is a prompt that is
  already formatted, as in the handout's sft.jsonl: it goes to the model as it stands.
- answer: the first of `ANSWER_FIELDS`. A worked solution is reduced to its answer: what follows ``####`` on the last
  line, thousands commas removed, else the content of the last balanced ``\boxed{}``. A number stays as it is written.
- ``nums`` (or ``numbers``) and ``target`` without a question are a Countdown puzzle.
- response: ``response``, else ``completion``.
- id: ``id``, else ``unique_id``, else the file's stem and the row's number.
"""

import csv
import difflib
import hashlib
import itertools
import json
import math
import re
import tomllib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, Literal

from rlvr_cli.errors import RlvrError, missing_extra
from rlvr_cli.records import Example
from rlvr_cli.synthetic import arithmetic, countdown, countdown_question
from rlvr_cli.text import storable

Purpose = Literal["eval", "train", "traces"]

QUESTION_FIELDS = ("question", "problem", "prompt", "input", "query", "instruction")
ANSWER_FIELDS = ("ground_truth", "answer", "final_answer", "expected_answer", "target", "solution")
RESPONSE_FIELDS = ("response", "completion")
ID_FIELDS = ("id", "unique_id")
NUMBERS_FIELDS = ("nums", "numbers")
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
MAX_LINE_BYTES = 64 * 2**20  # a longer line is no row, and a file without line ends must not fill the memory
SHOWN_BAD_ROWS = 5

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE = re.compile(r"[^\s${}\\]+")
_BRACE = re.compile(r"\\.|[{}]")  # \{ and \} delimit nothing
_GENERATORS = {"arithmetic": arithmetic, "countdown": countdown}


@dataclass(frozen=True)
class Dataset:
    """Examples, and what is to be said about where they came from."""

    name: str  # what was asked for
    split: str | None  # None for a file
    examples: list[Example]
    fingerprint: str  # SHA-256, hex, of the examples' content: ids, questions, truths, prompts, responses, in order
    source: str
    licence: str | None = None  # None: not known here
    default_grader: str | None = None  # None: the prompt decides
    num_skipped: int = 0  # bad rows left out
    skipped: list[str] = field(default_factory=list)  # the first of them, "FILE:LINE: what is wrong"; "and N more"
    notes: list[str] = field(default_factory=list)  # what the user should hear: too few rows, answers of mixed form

    @property
    def rows(self) -> int:
        return len(self.examples)


@dataclass(frozen=True)
class Recipe:
    """datasets/NAME.toml: where a built-in dataset's rows come from."""

    name: str
    source: str
    licence: str
    training_split: str
    evaluation_split: str
    grader: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)  # split -> file beside the recipe
    hub: Mapping[str, Any] = field(default_factory=dict)  # name, configs, question_field, answer_field, answer_form


@dataclass(frozen=True, slots=True)
class _Row:
    where: str
    number: int | str  # names the row in its id
    values: Mapping[str, Any]
    keys: Sequence[str]  # every key there was, also those not read


class _BadRow(Exception):
    """One row that cannot be used: readers yield it, so that what follows it can still be read."""

    def __init__(self, where: str, problem: str, hint: str = "") -> None:
        super().__init__(where, problem, hint)
        self.where, self.problem, self.hint = where, problem, hint

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


@dataclass(frozen=True)
class _Source:
    """Rows to be read, and what is known of them before."""

    name: str
    split: str | None
    rows: Generator[_Row | _BadRow]
    stem: str  # of the ids of rows that have none
    source: str
    licence: str | None = None
    grader: str | None = None
    question_field: str | None = None
    answer_field: str | None = None
    answer_form: str | None = None  # "####" or "boxed": every answer must have it


# What is asked for


def load_dataset(
    spec: str,
    *,
    split: str | None = None,
    limit: int | None = None,
    question_field: str | None = None,
    answer_field: str | None = None,
    skip_bad_lines: bool = False,
    seed: int = 0,
    purpose: Purpose = "eval",
) -> Dataset:
    """Questions with their ground truths; the module's docstring says what `spec` may be and how a row is read.

    Args:
        split: of a named dataset or a directory. None or "": the one that `purpose` calls for.
        limit: the first so many usable rows; what comes after them is not read. More than there are: a note says so.
        question_field: field with the question. None or "": found by name.
        answer_field: field with the answer. None or "": found by name.
        skip_bad_lines: leave bad rows out and list them in `skipped`, instead of raising on the first.
        seed: of NAME:SIZE, when it names none.
        purpose: "eval" takes the evaluation split, also of generated data, so that no question trained on is measured;
            "train" takes the training split; "traces" takes it to fine-tune on: every example has a response, and one
            without a ground truth has "" there.

    Raises:
        RlvrError: an unknown name, an unreadable file, a bad row, no rows, no network, a missing extra.
    """
    split, question_field, answer_field = split or None, question_field or None, answer_field or None
    if limit is not None and limit < 1:
        raise RlvrError(f"A limit of {limit} leaves no examples.", "Give at least 1.")
    name, *numbers = spec.split(":")
    if name in dataset_names():
        if numbers:
            if question_field or answer_field:
                raise RlvrError(f"{spec} is generated: its fields have no other names.", "Leave the field options out.")
            return _generated(spec, split, limit=limit, seed=seed, purpose=purpose)
        source = _from_recipe(recipe(name), split, purpose=purpose)
    elif spec.startswith("hf:"):
        source = _from_hub(spec, split, purpose=purpose)
    else:
        source = _from_path(spec, split, purpose=purpose)
    reading = _Reading(
        stem=storable(source.stem),  # a file's name can hold bytes that are no text
        question_field=question_field or source.question_field,
        answer_field=answer_field or source.answer_field,
        answer_form=None if answer_field else source.answer_form,
        prompt_is_question=question_field == "prompt",
        traces=purpose == "traces",
    )
    with closing(source.rows) as rows:  # also after an error, whose traceback would keep the file open
        examples, skipped = reading.examples(rows, name=source.name, limit=limit, skip_bad_lines=skip_bad_lines)
    more = len(skipped) - SHOWN_BAD_ROWS
    return Dataset(
        name=storable(source.name),
        split=source.split,
        examples=examples,
        fingerprint=_fingerprint(examples),
        source=storable(source.source),
        licence=source.licence,
        default_grader=source.grader or ("countdown" if reading.num_puzzles == len(examples) else None),
        skipped=[storable(str(bad)) for bad in skipped[:SHOWN_BAD_ROWS]] + ([f"and {more:,} more"] if more > 0 else []),
        num_skipped=len(skipped),
        notes=reading.notes() + _limit_note(source.name, len(examples), limit),
    )


def load_traces(
    spec: str,
    *,
    split: str | None = None,
    limit: int | None = None,
    question_field: str | None = None,
    answer_field: str | None = None,
    skip_bad_lines: bool = False,
) -> Dataset:
    """Examples to fine-tune on: `load_dataset` with the purpose "traces"."""
    return load_dataset(
        spec,
        split=split,
        limit=limit,
        question_field=question_field,
        answer_field=answer_field,
        skip_bad_lines=skip_bad_lines,
        purpose="traces",
    )


def dataset_names() -> list[str]:
    """The names of the built-in datasets."""
    return sorted(path.stem for path in _recipes().glob("*.toml") if "training_split" in _toml(path))


def recipe(name: str) -> Recipe:
    """The recipe of a built-in dataset."""
    return Recipe(name=name, **_toml(_recipes() / f"{name}.toml"))


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _recipes() -> Path:
    package = Path(__file__).parent
    installed = package / "builtin_datasets"  # in a wheel; in a checkout they lie beside the package
    return installed if installed.is_dir() else package.parent / "datasets"


def _generated(spec: str, split: str | None, *, limit: int | None, seed: int, purpose: Purpose) -> Dataset:
    name, *numbers = spec.split(":")
    if name not in _GENERATORS:
        raise RlvrError(
            f"{name} is no generated dataset: {spec!r} has no meaning.",
            f"The generated ones are {_named(_GENERATORS)}.",
        )
    if len(numbers) > 2 or not all(re.fullmatch(r"[0-9]{1,9}", number) for number in numbers) or int(numbers[0]) < 1:
        raise RlvrError(
            f"{spec!r} is not {name}:SIZE or {name}:SIZE:SEED.", f"For example {name}:8000 or {name}:8000:7."
        )
    size, *given = map(int, numbers)
    made_from = recipe(name)
    split = split or (made_from.evaluation_split if purpose == "eval" else made_from.training_split)
    seed = given[0] if given else seed
    examples = _GENERATORS[name](min(size, limit or size), seed=seed, split=split)
    return Dataset(
        name=f"{name}:{size}:{seed}",
        split=split,
        examples=examples,
        fingerprint=_fingerprint(examples),
        source=f"generated by rlvr (seed {seed})",
        licence=made_from.licence,
        default_grader=made_from.grader,
        notes=_limit_note(spec, len(examples), limit),
    )


def _from_recipe(made_from: Recipe, split: str | None, *, purpose: Purpose) -> _Source:
    split = split or (made_from.evaluation_split if purpose == "eval" else made_from.training_split)
    name = made_from.name
    if made_from.hub:
        rows = _hub_rows(made_from.hub["name"], made_from.hub["configs"], split=split)
    elif split in made_from.files:
        rows = _file_rows(_recipes() / made_from.files[split])
    else:
        raise RlvrError(f"{name} has no split {split!r}.", f"Its splits are {_named(made_from.files)}.")
    return _Source(
        name=name,
        split=split,
        rows=rows,
        stem=f"{name}-{split}",
        source=made_from.source,
        licence=made_from.licence,
        grader=made_from.grader,
        question_field=made_from.hub.get("question_field"),
        answer_field=made_from.hub.get("answer_field"),
        answer_form=made_from.hub.get("answer_form"),
    )


def _from_hub(spec: str, split: str | None, *, purpose: Purpose) -> _Source:
    name, _, config = spec.removeprefix("hf:").partition(":")
    if not name:
        raise RlvrError(f"{spec!r} names no dataset of the hub.", "Write hf:ORG/NAME or hf:ORG/NAME:CONFIG.")
    split = split or ("test" if purpose == "eval" else "train")
    return _Source(
        name=spec,
        split=split,
        rows=_hub_rows(name, [config or None], split=split),
        stem=f"{name.rsplit('/', 1)[-1]}-{split}",
        source=f"https://huggingface.co/datasets/{name}",
    )


def _from_path(spec: str, split: str | None, *, purpose: Purpose) -> _Source:
    path = Path(spec)
    try:
        is_directory, exists = path.is_dir(), path.exists()
    except OSError as e:
        raise RlvrError(f"Cannot read {spec}: {e.strerror}.") from e
    if is_directory:
        path, split = _split_file(path, split, purpose=purpose)
    elif not exists:
        raise _unknown(spec)
    elif split:
        raise RlvrError(f"{spec} is one file: it has no split {split!r}.", "Leave --split out, or name another file.")
    elif path.suffix.lower() not in SUFFIXES:
        raise RlvrError(f"{spec}: cannot tell what kind of file this is.", f"Its name must end in {_named(SUFFIXES)}.")
    return _Source(name=spec, split=split, rows=_file_rows(path), stem=path.stem, source=str(path))


def _split_file(directory: Path, split: str | None, *, purpose: Purpose) -> tuple[Path, str]:
    if (directory / "run.json").exists():
        raise RlvrError(
            f"{directory} is a run, not a dataset.", f"To make one of it: rlvr filter {directory} --out FILE.jsonl"
        )
    files = [path for path in sorted(directory.iterdir()) if path.suffix.lower() in SUFFIXES and path.is_file()]
    wanted = [split] if split else ["validation", "test"] if purpose == "eval" else ["train"]
    for name in wanted:
        match [path for path in files if path.stem == name]:
            case [path]:
                return path, name
            case [_, *_] as several:
                raise RlvrError(
                    f"The directory {directory} has several files for {name}.", f"Name one of {_named(several)}."
                )
    raise RlvrError(
        f"The directory {directory} has no file for the split {' or '.join(wanted)}.",
        f"It has {_named(path.stem for path in files)}; choose with --split."
        if files
        else "Name a file, or put train.jsonl, validation.jsonl or test.jsonl there.",
    )


def _unknown(spec: str) -> RlvrError:
    names = dataset_names()
    if "/" in spec or "\\" in spec or Path(spec).suffix.lower() in SUFFIXES:
        return RlvrError(f"There is no file {spec}.", f"The built-in datasets are {_named(names)}.")
    close = difflib.get_close_matches(spec.partition(":")[0], names, n=1)
    return RlvrError(
        f"There is no dataset {spec!r}, neither built in nor as a file.",
        (f"Did you mean {close[0]!r}? " if close else "")
        + f"The built-in ones are {_named(names)}; others are hf:ORG/NAME or a file that ends in {_named(SUFFIXES)}.",
    )


def _limit_note(name: str, rows: int, limit: int | None) -> list[str]:
    return [f"{name} has only {rows:,} of the {limit:,} examples asked for."] if limit and rows < limit else []


def _fingerprint(examples: Iterable[Example]) -> str:
    digest = hashlib.sha256()
    for e in examples:
        digest.update(json.dumps([e.id, e.question, e.ground_truth, e.prompt, e.response]).encode() + b"\n")
    return digest.hexdigest()


# From a row to an Example


@dataclass
class _Reading:
    """What one source's rows have in common: their fields, fixed by the first row that has them, and the ids so far."""

    stem: str
    question_field: str | None
    answer_field: str | None
    answer_form: str | None
    prompt_is_question: bool  # the user says so: it is not formatted yet, whatever stands beside it
    traces: bool  # a response is needed, a ground truth is not
    where_is: dict[str, str] = field(default_factory=dict)  # id -> its row
    num_puzzles: int = 0
    num_marked: int = 0  # answers found by their mark
    whole: list[str] = field(default_factory=list)  # rows whose answers were taken whole

    def examples(
        self, rows: Iterable[_Row | _BadRow], *, name: str, limit: int | None, skip_bad_lines: bool
    ) -> tuple[list[Example], list[_BadRow]]:
        """The usable rows, at most `limit`, and the bad ones among those read."""
        examples: list[Example] = []
        skipped: list[_BadRow] = []
        for row in rows:
            try:
                if isinstance(row, _BadRow):
                    raise row
                examples.append(self.example(row))
            except _BadRow as bad:
                if not skip_bad_lines:
                    raise RlvrError(str(bad), f"{bad.hint} To leave such rows out: --skip-bad-lines".strip()) from None
                skipped.append(bad)
            if len(examples) == limit:
                break
        if not examples and skipped:
            raise RlvrError(f"{name}: none of its {len(skipped)} rows can be used. {skipped[0]}", skipped[0].hint)
        if not examples:
            raise RlvrError(f"{name}: there are no rows in it.", "Is it the right file?")
        return examples, skipped

    def example(self, row: _Row) -> Example:
        response_field = _first(RESPONSE_FIELDS, row.keys)
        response = _text(row, response_field) if response_field else None
        if self.traces and (response is None or not response.strip()):
            raise _BadRow(
                row.where,
                f"no response to train on: looked for {_named(RESPONSE_FIELDS)}; the keys are {_named(row.keys)}.",
                "Fine-tuning needs traces: {prompt, response} rows.",
            )
        question_field = self.question_field or _first(QUESTION_FIELDS, row.keys)
        numbers_field = _first(NUMBERS_FIELDS, row.keys)
        if question_field is None and numbers_field is not None and "target" in row.keys:
            question, truth = _puzzle(row, numbers_field)
            self.num_puzzles += 1
        else:
            question = self.question(row, question_field)
            truth = self.truth(row)
        is_formatted = response_field is not None and "prompt" in row.keys and not self.prompt_is_question
        prompt = _text(row, "prompt") if is_formatted else None
        return Example(
            id=self.new_id(row), question=question, ground_truth=truth, prompt=prompt or None, response=response or None
        )

    def question(self, row: _Row, question_field: str | None) -> str:
        question = _text(row, question_field) if question_field else None
        if question is None or not question.strip():
            looked_for = self.question_field or _named(QUESTION_FIELDS)
            raise _BadRow(
                row.where,
                f"no question: looked for {looked_for}; the keys are {_named(row.keys)}.",
                "Name its field: --question-field.",
            )
        self.question_field = question_field
        return question

    def truth(self, row: _Row) -> str:
        answer_field = self.answer_field or _first(ANSWER_FIELDS, row.keys)
        answer = _text(row, answer_field) if answer_field else None
        if answer is None or not answer.strip():
            if self.traces:
                return ""
            looked_for = self.answer_field or _named(ANSWER_FIELDS)
            raise _BadRow(
                row.where,
                f"no answer: looked for {looked_for}; the keys are {_named(row.keys)}.",
                "Name its field: --answer-field.",
            )
        self.answer_field = answer_field
        form, truth = final_answer(answer)
        if not truth:
            raise _BadRow(row.where, f"the answer in {answer_field!r} has a {form} mark with nothing after it.")
        if self.answer_form and form != self.answer_form:
            raise _BadRow(row.where, f"the answer in {answer_field!r} has no {self.answer_form} mark.")
        if form == "whole":
            self.whole.append(row.where)
        else:
            self.num_marked += 1
        return truth

    def new_id(self, row: _Row) -> str:
        given = (_text(row, name) for name in ID_FIELDS if name in row.keys)
        example_id = next((text for text in given if text), f"{self.stem}-{row.number}")
        if example_id in self.where_is:
            raise _BadRow(
                row.where,
                f"the id {_named([example_id])} is taken: {self.where_is[example_id]} has it too.",
                "Ids must be unique; without an id field, rows are numbered.",
            )
        self.where_is[example_id] = row.where
        return example_id

    def notes(self) -> list[str]:
        if not self.whole or not self.num_marked:
            return []
        answers = len(self.whole) + self.num_marked
        return [
            f"{len(self.whole):,} of {answers:,} answers have neither #### nor \\boxed and were taken whole; "
            f"the first is {storable(self.whole[0])}."
        ]


def final_answer(text: str) -> tuple[str, str]:
    r"""(form, answer): how a text marks its final answer, and that answer, stripped; "" when it cannot be read.

    "####" is GSM8K's mark: the rest of the last line, thousands commas removed. "boxed" is MATH's: the content of the
    last balanced ``\boxed{}`` or ``\fbox{}``. "whole" is any other text.
    """
    _, mark, tail = text.rstrip().rpartition("####")
    if mark and "\n" not in tail:
        answer = tail.strip()
        return "####", answer.replace(",", "") if re.fullmatch(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d+)?", answer) else answer
    if _BOX.search(text):
        return "boxed", (_last_boxed(text) or "").strip()
    return "whole", text.strip()


def _last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{}`` whose braces balance; ``\boxed 5``, without braces, counts too."""
    for box in reversed(list(_BOX.finditer(text))):
        start = box.end()
        if text[start : start + 1] != "{":
            if bare := _BARE.match(text, start):
                return bare[0].rstrip(".,;")
            continue
        depth = 0
        for brace in _BRACE.finditer(text, start):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                return text[start + 1 : brace.start()]
    return None


def _puzzle(row: _Row, numbers_field: str) -> tuple[str, str]:
    target, numbers = row.values["target"], row.values[numbers_field]
    integers = (
        [n for n in (*numbers, target) if re.fullmatch(r"-?[0-9]{1,12}", str(n))] if isinstance(numbers, list) else []
    )
    if len(integers) < 2 or len(integers) != len(numbers) + 1:
        raise _BadRow(row.where, f"{numbers_field!r} is not a list of integers with an integer 'target' beside it.")
    *numbers, target = map(int, integers)
    return countdown_question(numbers, target), json.dumps({"numbers": numbers, "target": target})


def _text(row: _Row, key: str) -> str | None:
    """A field's text; a number as it is written; None where there is nothing."""
    value = row.values.get(key)
    match value:
        case None:
            return None
        case str():
            return storable(value)
        case bool():
            kind = "a truth value"
        case int():
            return str(value)
        case float() if math.isfinite(value):
            return repr(value)
        case float():
            kind = str(value)
        case Decimal():
            return format(value, "f")
        case list() | tuple():
            kind = "a list"
        case dict():
            kind = "an object"
        case _:
            kind = type(value).__name__
    raise _BadRow(row.where, f"{key!r} should be text or a number; it is {kind}.", "Name another field, or flatten it.")


def _first(names: Sequence[str], keys: Sequence[str]) -> str | None:
    """The first of `names` among `keys`; failing that, the first that differs in case only."""
    for name in names:
        if name in keys:
            return name
    folded = {key.lower(): key for key in reversed(keys)}
    return next((folded[name] for name in names if name in folded), None)


def _named(names: Iterable[Any]) -> str:
    """Names in a message: the first dozen, none longer than a line's worth."""
    shown = [str(name) if len(str(name)) <= 40 else f"{str(name)[:40]}…" for name in names]
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more" if len(shown) > 12 else "") or "none"


# Rows out of files


def _file_rows(path: Path) -> Generator[_Row | _BadRow]:
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            yield from _parquet_rows(path)
        elif suffix == ".csv":
            yield from _csv_rows(path)
        elif suffix == ".json" and _starts_an_array(path):
            yield from _json_array_rows(path)
        else:
            yield from _json_line_rows(path)
    except OSError as e:
        raise RlvrError(f"Cannot read {path}: {e.strerror or e}.") from e


def _json_line_rows(path: Path) -> Generator[_Row | _BadRow]:
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file), start=1):
            where = f"{path}:{number}"
            if line is None:
                yield _BadRow(
                    where, f"the line is longer than {MAX_LINE_BYTES // 2**20} MiB.", "One JSON object per line."
                )
                continue
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                yield _row(_parse_json(line.rstrip(b"\r\n").decode()), where, number)
            except UnicodeDecodeError as e:
                yield _BadRow(
                    where, f"byte {line[e.start]:#04x} at column {e.start + 1} is not UTF-8.", "Save it as UTF-8."
                )
            except json.JSONDecodeError as e:
                hint = "One JSON object per line." if line.endswith(b"\n") else "The file ends here: is it cut off?"
                yield _BadRow(where, f"not valid JSON: {_json_fault(e)}.", hint)
            except _Unusable as e:
                yield _BadRow(where, str(e))


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    r"""Lines ended by \n alone: U+2028 and its like end no line. None for one that is too long."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)
        yield None


def _starts_an_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _json_array_rows(path: Path) -> Generator[_Row | _BadRow]:
    try:
        items = _parse_json(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        raise RlvrError(
            f"{path} is not UTF-8: byte {e.object[e.start]:#04x} at offset {e.start}.", "Save it as UTF-8."
        ) from e
    except json.JSONDecodeError as e:
        raise RlvrError(f"{path}:{e.lineno}: not valid JSON: {_json_fault(e)}.") from e
    except _Unusable as e:
        raise RlvrError(f"{path}: {e}") from e
    for number, item in enumerate(items, start=1):
        yield _row(item, f"{path}: item {number}", number)


def _json_fault(error: json.JSONDecodeError) -> str:
    return f"{error.msg.removesuffix(' at')} at column {error.colno}"


class _Unusable(ValueError):
    """JSON that parses and still must not be read."""


def _parse_json(text: str) -> Any:
    """JSON with its numbers as text: exact, however long. NaN and the infinities, which are not JSON, become floats."""
    try:
        return json.loads(text, parse_int=str, parse_float=str, object_pairs_hook=_object)
    except RecursionError:
        raise _Unusable("it is nested too deeply.") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _Unusable(f"the key {_named([key for key in keys if keys.count(key) > 1][:1])} occurs more than once.")
    return values


def _row(value: Any, where: str, number: int) -> _Row | _BadRow:
    if isinstance(value, dict):
        return _Row(where, number, value, list(value))
    kind = {list: "an array", type(None): "null", bool: "a truth value"}.get(type(value), "text or a number")
    return _BadRow(
        where,
        f'expected a JSON object such as {{"question": …, "answer": …}}, found {kind}.',
        "A file that is one array must end in .json." if isinstance(value, list) else "",
    )


def _csv_rows(path: Path) -> Generator[_Row | _BadRow]:
    # undecodable bytes come out as lone surrogates, so that the row they stand in can be named
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        limit = csv.field_size_limit(MAX_LINE_BYTES)
        try:
            header = next((cells for cells in reader if not _is_blank(cells)), [])
            if len(set(header)) != len(header):
                raise RlvrError(f"{path}:{reader.line_num}: two columns have the same name: {_named(header)}.")
            number = 0
            while True:
                line = reader.line_num + 1
                try:
                    cells = next(reader, None)
                except csv.Error as e:
                    number += 1
                    yield _BadRow(f"{path}:{line}", f"row {number} is not valid CSV: {e}.")
                    continue
                if cells is None:
                    return
                if _is_blank(cells):
                    continue
                number += 1
                yield _csv_row(header, cells, f"{path}:{line}", number)
        except csv.Error as e:
            raise RlvrError(f"{path}:{reader.line_num}: the header is not valid CSV: {e}.") from e
        finally:
            csv.field_size_limit(limit)


def _is_blank(cells: list[str]) -> bool:
    return not "".join(cells[:1]).strip() and len(cells) < 2


def _csv_row(header: list[str], cells: list[str], where: str, number: int) -> _Row | _BadRow:
    if len(cells) != len(header):
        return _BadRow(where, f"row {number} has {len(cells)} cells; the header has {len(header)}: {_named(header)}.")
    for cell in cells:
        if escaped := re.search("[\udc80-\udcff]", cell):
            return _BadRow(
                where, f"byte {ord(escaped[0]) - 0xDC00:#04x} in row {number} is not UTF-8.", "Save it as UTF-8."
            )
    return _Row(where, number, {key: cell or None for key, cell in zip(header, cells, strict=True)}, header)


def _parquet_rows(path: Path) -> Generator[_Row | _BadRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            keys = file.schema_arrow.names
            if len(set(keys)) != len(keys):
                raise RlvrError(f"{path}: two columns have the same name: {_named(keys)}.")
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    yield _Row(f"{path}: row {number}", number, values, keys)
    except (pa.ArrowException, UnicodeDecodeError) as e:
        raise RlvrError(f"{path} is not a readable Parquet file: {e}.", "Is it complete?") from e


def _hub_rows(name: str, configs: Sequence[str | None], *, split: str) -> Generator[_Row]:
    """The rows of a hub dataset; several configs take turns, so that the first N rows have some of each."""
    try:
        from datasets.exceptions import DatasetsError

        from datasets import load_dataset as fetch  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:  # the datasets/ folder of a checkout can be found under this name, and has none of it
        raise missing_extra("Hugging Face datasets", "hub") from None

    def rows(config: str | None) -> Iterator[_Row]:
        try:
            table = fetch(name, config, split=split)
        except (OSError, ValueError, DatasetsError) as e:
            which = f"{name} ({config})" if config else name
            why = " ".join(str(e).split())[:500] or type(e).__name__
            raise RlvrError(
                f"Cannot get the split {split!r} of {which} from the Hugging Face hub: {why}",
                "Check the name (hf:ORG/NAME:CONFIG), --split and the network, or give the path of a file.",
            ) from e
        for number, values in enumerate(table, start=1):
            row_name = f"{config}-{number}" if len(configs) > 1 else number
            where = f"{name}{f':{config}' if config else ''} {split} row {number}"
            yield _Row(where, row_name, dict(values), list(values))

    taking_turns = itertools.zip_longest(*(rows(config) for config in configs))
    return (row for turn in taking_turns for row in turn if row is not None)
