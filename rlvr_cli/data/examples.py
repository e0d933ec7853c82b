"""Convert the rows of a dataset to examples: find the fields of question and answer, and the final answer."""

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from itertools import accumulate, islice
from typing import Any, Literal, TypeVar

from rlvr_cli.data.conversations import conversation_of
from rlvr_cli.data.files import BadRow, Number, Row, ids_of, join_names, text_of
from rlvr_cli.data.synthetic import countdown_question
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.answers.choices import LETTERS
from rlvr_cli.graders.multiple_choice import letter_of, reference_response, truth_of
from rlvr_cli.runs.storage.spilled import SpillingDict, spilled
from rlvr_cli.text import storable
from rlvr_cli.types import Example, SampledIds

T = TypeVar("T")
Purpose = Literal["eval", "train", "traces"]

QUESTION_FIELDS = ("question", "problem", "prompt", "input", "query", "instruction")
ANSWER_FIELDS = ("ground_truth", "answer", "final_answer", "expected_answer", "target", "solution")
RESPONSE_FIELDS = ("response", "completion")
ID_FIELDS = ("id", "unique_id")
NUMBERS_FIELDS = ("nums", "numbers")
OPTIONS_FIELDS = ("options", "choices")
OWN_GRADERS = {"countdown": "Countdown puzzles", "multiple_choice": "multiple choice"}  # and what its rows are
SHOWN_BAD_ROWS = 5

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")  # GSM8K's "<<48/2=24>>24"
_BARE = re.compile(r"[^\s${}\\]+")
_ASSERTION = re.compile(r"^assert[ (]", re.MULTILINE)
_BRACE = re.compile(r"\\.|[{}]")  # \{ and \} do not count


def usable_rows(
    rows: Iterable[Row | BadRow],
    read: Callable[[Row], T],
    *,
    name: str,
    limit: int | None = None,
    skip_bad_lines: bool,
    collect: Callable[[Iterable[T]], Sequence[T]] = list,
) -> tuple[Sequence[T], list[BadRow]]:
    """Read rows, at most `limit` usable ones. Returns what they give, and the bad ones among those read.

    Args:
        read: raises BadRow for a row that cannot be used.
        name: of the source.
        skip_bad_lines: go on after a bad row.
        collect: what keeps the usable ones.

    Raises:
        RlvrError: a row is bad and `skip_bad_lines` is off, or no row can be used.
    """
    skipped: list[BadRow] = []

    def readable() -> Iterator[T]:
        for row in rows:
            try:
                if isinstance(row, BadRow):
                    raise row
                found = read(row)
            except BadRow as bad:
                if not skip_bad_lines:
                    raise RlvrError(str(bad), f"{bad.hint} To leave such rows out: --skip-bad-lines".strip()) from None
                skipped.append(bad)
            else:
                yield found

    usable = collect(islice(readable(), limit))
    if not usable and skipped:
        raise RlvrError(f"{name}: none of its {len(skipped)} rows can be used. {skipped[0]}", skipped[0].hint)
    if not usable:
        raise RlvrError(f"{name}: there are no rows in it.", "Is it the right file?")
    return usable, skipped


# From a row to an Example


@dataclass
class RowReader:
    """Reads the rows of one source. The first row that has a question or an answer fixes its field for all rows."""

    stem: str
    question_field: str | None
    answer_field: str | None
    answer_form: str | None
    prompt_is_question: bool  # --question-field prompt: it is not formatted yet, even in a row with a response
    traces: bool  # for SFT: a row needs a response but no ground truth
    needs_answers: bool = True  # a grader reads the ground truth
    keeps_traces: bool = False  # in `trace_of`, what the examples lack without `traces`
    trace_of: MutableMapping[str, str] = field(default_factory=SpillingDict)  # id -> `trace` of its row, as JSON
    sampled: dict[str, SampledIds] = field(default_factory=dict)  # id -> the ids of its turns, where the row has them
    where_is: MutableMapping[str, str] = field(default_factory=SpillingDict)  # id -> FILE:LINE of its row
    found_answer_field: str | None = None  # of the first row, if none was named
    kinds: Counter[str] = field(default_factory=Counter)  # of usable rows: a grader, else the form of the answer, or ""
    first_whole: str = ""  # FILE:LINE of the first answer that is the whole text

    def examples(
        self, rows: Iterable[Row | BadRow], *, name: str, limit: int | None, skip_bad_lines: bool
    ) -> tuple[Sequence[Example], list[BadRow]]:
        """The usable rows, at most `limit`, and the bad ones among those read. Of many questions most are on disk."""
        # A trace may have turns, and all traces are trained on.
        collect = list if self.traces else partial(spilled, record=Example)
        return usable_rows(rows, self.example, name=name, limit=limit, skip_bad_lines=skip_bad_lines, collect=collect)

    def example(self, row: Row) -> Example:
        response_field = first_field(RESPONSE_FIELDS, _filled(row))
        response = text_of(row, response_field) if response_field else None
        turns = _turns(row) if self.traces and response_field is None else None
        if turns is not None:
            response, response_field = "".join(text for _, text in turns), "turns"
        prompt_ids, ids = ([], []) if turns is None else _ids_of_turns(row)
        conversation = conversation_of(row) if self.traces and response_field is None else None
        if conversation is not None:
            response, response_field = conversation.text, "messages"
        options_field = first_field(OPTIONS_FIELDS, _filled(row)) if conversation is None else None
        is_trace = self.traces and response_field is None
        solution = _steps_in(self.answer_with_steps(row)) if is_trace and options_field is None else None
        if self.traces and not (response or "").strip() and not solution and options_field is None:
            raise BadRow(
                row.where,
                f"no response to train on: looked for {join_names(RESPONSE_FIELDS)}; the keys are {join_names(row.keys)}.",
                "Fine-tuning and few-shot prompts need traces: {prompt, response} rows, or worked solutions that end in #### or \\boxed{}.",
            )
        question_field = self.question_field or first_field(QUESTION_FIELDS, row.keys)
        numbers_field = first_field(NUMBERS_FIELDS, row.keys)
        if conversation is not None:
            question, (kind, truth) = conversation.question, self.truth(row)
        elif question_field is None and numbers_field is not None and "target" in row.keys:
            kind, (question, truth) = "countdown", _puzzle(row, numbers_field)
        elif options_field is not None:
            kind, (question, truth) = "multiple_choice", self.choice(row, question_field, options_field)
            solution = reference_response(truth) if is_trace else None
        else:
            question = self.question(row, question_field)
            kind, truth = self.truth(row)
        # A null response, too, says that the prompts of its file are formatted.
        has_response = (first_field(RESPONSE_FIELDS, row.keys) or response_field) is not None and conversation is None
        prompt = self.own_prompt(row) if has_response else None
        example_id = self.new_id(row)
        self.kinds[kind] += 1  # after all that may refuse the row
        if kind == "whole":
            self.first_whole = self.first_whole or row.where
        if turns is not None and ids:
            self.sampled[example_id] = _sampled(turns, prompt_ids, ids)
        if self.keeps_traces and (trace := self.trace(row, truth)):
            self.trace_of[example_id] = json.dumps(trace, default=str)
        return Example(
            id=example_id,
            question=question,
            ground_truth=truth,
            prompt=prompt or None,
            response=response or None,
            solution=solution,
            turns=turns,
            conversation=conversation,
        )

    def question(self, row: Row, question_field: str | None) -> str:
        question = text_of(row, question_field) if question_field else None
        if question is None or not question.strip():
            raise _nothing(row, "question", self.question_field, QUESTION_FIELDS, found=question_field)
        self.question_field = question_field
        return question

    def own_prompt(self, row: Row) -> str | None:
        """What is formatted already, of a row with a response; None if there is none, or if it is the question."""
        prompt_field = None if self.prompt_is_question else first_field(["prompt"], row.keys)
        return text_of(row, prompt_field) if prompt_field else None

    def truth(self, row: Row) -> tuple[str, str]:
        """The form of the answer, and the answer itself, as `final_answer` gives them; both are empty if none is needed."""
        named = self.answer_field or self.found_answer_field
        answer_field = named or first_field(ANSWER_FIELDS, row.keys)
        answer = _answer_of(row, answer_field) if answer_field else None
        if answer is None or not answer.strip():
            if self.traces or not self.needs_answers:
                return "", ""
            raise _nothing(row, "answer", named, ANSWER_FIELDS, found=answer_field)
        self.found_answer_field = answer_field
        form, truth = final_answer(answer)
        if not truth:
            raise BadRow(row.where, f"the answer in {answer_field!r} has a {form} mark with nothing after it.")
        if self.answer_form and form != self.answer_form:
            raise BadRow(row.where, f"the answer in {answer_field!r} has no {self.answer_form} mark.")
        return form, truth

    def choice(self, row: Row, question_field: str | None, options_field: str) -> tuple[str, str]:
        """The question with its options, one a line, and the ground truth of `graders.multiple_choice`."""
        options = row.values[options_field]
        while isinstance(options, list) and options and options[-1] is None:  # the padding of a column
            options = options[:-1]
        if not isinstance(options, list) or not 2 <= len(options) <= len(LETTERS):
            raise BadRow(row.where, f"its {options_field!r} are not a list of 2 to {len(LETTERS)} options.")
        if None in options:
            raise BadRow(row.where, f"its {options_field!r} have a null before the last option.")
        texts = [storable(str(option)) for option in options]
        answer_field = self.answer_field or self.found_answer_field or first_field(ANSWER_FIELDS, row.keys)
        letter = _right_letter(row, answer_field, options, texts)
        self.found_answer_field = answer_field
        lines = [f"{name}. {text}" for name, text in zip(LETTERS, texts, strict=False)]
        subject = text_of(row, "subject") if "subject" in row.keys else None
        return "\n".join([self.question(row, question_field), *lines]), truth_of(letter, texts, subject)

    def grader_of(self, rows: int) -> str | None:
        """The grader of a source whose rows are all of one kind."""
        return next((grader for grader in OWN_GRADERS if self.kinds[grader] == rows), None)

    def mixed(self, rows: int) -> str:
        """Which rows alone have a grader of their own; empty if none or all of them have it."""
        parts = (
            f"{n:,} of {rows:,} rows are {what}"
            for grader, what in OWN_GRADERS.items()
            if 0 < (n := self.kinds[grader]) < rows
        )
        return " and ".join(parts)

    def answer_with_steps(self, row: Row) -> str:
        """The first field with a worked solution, whole: the one that was named goes before `solution`. Empty if there is none."""
        names = (self.answer_field, "solution") if self.answer_field else ("solution", *ANSWER_FIELDS)
        values = (row.values.get(key) for name in names if (key := first_field([name], row.keys)))
        texts = (storable(value).strip() for value in values if isinstance(value, str))
        return next(filter(_steps_in, texts), "")

    def trace(self, row: Row, truth: str) -> dict[str, Any]:
        """The fields of a row that `rlvr sft` alone reads, where it can: turns with their prompt, messages, a worked solution."""
        found: dict[str, Any] = {}
        with suppress(BadRow):
            if turns := _turns(row):
                prompt_ids, ids = _ids_of_turns(row)
                found["turns"] = [{"role": role, "text": text} for role, text in turns]
                if ids:
                    found["turns"] = [turn | {"ids": own} for turn, own in zip(found["turns"], ids, strict=True)]
                    found["prompt_ids"] = prompt_ids
                found |= {"prompt": prompt} if (prompt := self.own_prompt(row)) else {}
        with suppress(BadRow):
            if conversation := conversation_of(row):
                found["messages"] = conversation.messages
                found |= {"tools": conversation.tools} if conversation.tools is not None else {}
        with suppress(BadRow):
            of_choice = first_field(OPTIONS_FIELDS, _filled(row)) is not None
            if of_choice and (response := reference_response(truth)):
                found["solution"] = f"{response}\n#### {letter_of(truth)[0]}"
            elif not of_choice and (worked := self.answer_with_steps(row)):
                found["solution"] = worked
        return found

    def new_id(self, row: Row) -> str:
        given = (text_of(row, name) for name in ID_FIELDS if name in row.keys)
        example_id = next((text for text in given if text), f"{self.stem}-{row.number}")
        if example_id in self.where_is:
            raise BadRow(
                row.where,
                f"the id {join_names([example_id])} is taken: {self.where_is[example_id]} has it too.",
                "Ids must be unique; without an id field, rows are numbered.",
            )
        self.where_is[example_id] = row.where
        return example_id

    def notes(self) -> list[str]:
        whole, marked = self.kinds["whole"], self.kinds["####"] + self.kinds["boxed"]
        if not whole or not marked:
            return []
        answers = whole + marked
        return [
            f"{whole:,} of {answers:,} answers have neither #### nor \\boxed and were taken whole; "
            f"the first is {storable(self.first_whole)}."
        ]


def final_answer(text: str) -> tuple[str, str]:
    r"""(form, answer): how a text marks its final answer, and the answer itself, stripped; "" if it cannot be read.

    "####" is GSM8K's mark: the rest of the last line, thousands commas removed. "boxed" is MATH's: the content of the
    last balanced ``\boxed{}`` or ``\fbox{}``. "whole" is any other text, and data and unit tests, in which such a mark is none.
    """
    _, mark, tail = text.rstrip().rpartition("####")
    is_hashed, is_boxed = bool(mark) and "\n" not in tail, bool(_BOX.search(text))
    if (is_hashed or is_boxed) and (_is_tests(text) or _is_json(text)):
        return "whole", text.strip()
    if is_hashed:
        answer = tail.strip()
        return "####", answer.replace(",", "") if re.fullmatch(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d+)?", answer) else answer
    if is_boxed:
        return "boxed", (_last_boxed(text) or "").strip()
    return "whole", text.strip()


def _answer_of(row: Row, key: str) -> str | None:
    """A field as text; a list of unit tests, inputs with outputs, becomes JSON. Raises BadRow for other types."""
    match row.values.get(key):
        case [_, *_] as cases if all(
            isinstance(case, dict) and all(type(case.get(name)) is str for name in ("input", "output"))
            for case in cases
        ):
            return storable(json.dumps(cases, ensure_ascii=False))
        case _:
            return text_of(row, key)


def _is_tests(text: str) -> bool:
    """Whether a text is Python with assertions."""
    try:
        return bool(_ASSERTION.search(text)) and any(isinstance(s, ast.Assert) for s in ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _steps_in(text: str) -> str | None:
    """A worked solution, without GSM8K's #### answer and calculator marks; None if the text is none."""
    form, _ = final_answer(text)
    if form == "####":
        return _CALCULATOR.sub("", text.rpartition("####")[0]).strip() or None
    return text if form == "boxed" and not _BOX.match(text) else None


def _is_json(text: str) -> bool:
    """Whether a text is a list or an object of JSON, such as tests of standard input and output."""
    try:
        return isinstance(json.loads(text), list | dict)
    except (ValueError, RecursionError):
        return False


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


def _right_letter(row: Row, answer_field: str | None, options: Sequence[object], texts: Sequence[str]) -> str:
    """The letter of the right option: the answer is a letter, else the place of an option, from 0, or its text.

    A number, not in quotes, among options that are texts is always a place: all rows of a dataset are read in one way.

    Raises:
        BadRow: there is no answer, it names no option, or may be one or another.
    """
    answer = ((text_of(row, answer_field) if answer_field else None) or "").strip()
    if answer in tuple(LETTERS[: len(texts)]):
        return answer
    if answer_field is None or not answer:
        raise _nothing(row, "answer", answer_field, ANSWER_FIELDS, found=answer_field)
    at_place = [place for place in range(len(texts)) if answer == str(place)]
    with_text = [place for place, text in enumerate(texts) if answer == text]
    is_place = _is_number(row.values[answer_field]) and not any(map(_is_number, options))
    if is_place:
        with_text = []
    named = sorted({*at_place, *with_text})
    if len(named) == 1:
        return LETTERS[named[0]]
    if named:
        raise BadRow(
            row.where,
            f"the answer {answer[:40]!r} may be the option {' or '.join(LETTERS[place] for place in named)}.",
            "Give the letter of the right one.",
        )
    what = f"the answer {answer[:40] if is_place else repr(answer[:40])}"
    hint = "Give its letter, its place from 0, or its text."
    if is_place:
        hint = "A number is a place, from 0: write texts in quotes, or give letters."
    raise BadRow(row.where, f"{what} names none of its {len(texts)} options.", hint)


def _is_number(value: object) -> bool:
    return isinstance(value, Number | int | float | Decimal)


def _puzzle(row: Row, numbers_field: str) -> tuple[str, str]:
    target, numbers = row.values["target"], row.values[numbers_field]
    integers = (
        [n for n in (*numbers, target) if re.fullmatch(r"-?[0-9]{1,12}", str(n))] if isinstance(numbers, list) else []
    )
    if len(integers) < 2 or len(integers) != len(numbers) + 1:
        raise BadRow(row.where, f"{numbers_field!r} is not a list of integers with an integer 'target' beside it.")
    *numbers, target = map(int, integers)
    return countdown_question(numbers, target), json.dumps({"numbers": numbers, "target": target})


def _nothing(row: Row, what: str, given: str | None, names: Sequence[str], *, found: str | None) -> BadRow:
    """What is wrong with a row without a question or an answer: it has no such field, or nothing is in it."""
    if found in row.keys:
        return BadRow(
            row.where, f"no {what}: its field {join_names([found])} is empty.", f"Or name another: --{what}-field."
        )
    looked_for = given or join_names(names)
    said = f"no {what}: looked for {looked_for}; the keys are {join_names(row.keys)}."
    every = ", which counts for every dataset of the command" if given else ""
    return BadRow(row.where, said, f"Name its field: --{what}-field{every}.")


def first_field(names: Sequence[str], keys: Sequence[str]) -> str | None:
    """The first of `names` among `keys`; failing that, the first that differs in case only."""
    for name in names:
        if name in keys:
            return name
    folded = {key.lower(): key for key in reversed(keys)}
    return next((folded[name] for name in names if name in folded), None)


def is_prompt(field_name: str | None) -> bool:
    """Whether a field is that of prompts."""
    return field_name is not None and field_name.lower() == "prompt"


def _filled(row: Row) -> list[str]:
    """The keys of a row whose values are neither null nor empty: in a Parquet file each row has the columns of all."""
    return [key for key in row.keys if row.values.get(key) not in (None, "")]


def _turns(row: Row) -> tuple[tuple[str, str], ...] | None:
    """The turns of a trace, as (role, text); None if the row has none."""
    turns = row.values.get("turns")
    if turns is None:
        return None
    if not isinstance(turns, list) or not all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("text"), str)
        for turn in turns
    ):
        raise BadRow(
            row.where,
            "its turns are not a list of {role, text}.",
            'Write {"turns": [{"role": "policy", "text": "..."}, ...]}.',
        )
    if turns and all(turn["role"] != "policy" for turn in turns):
        raise BadRow(row.where, "none of its turns is the policy's.", 'Give those that are learned the role "policy".')
    return tuple((turn["role"], storable(turn["text"])) for turn in turns)


def _ids_of_turns(row: Row) -> tuple[list[int], list[list[int]]]:
    """The token ids of the prompt and of each turn of a trace; empty if it has none."""
    prompt = ids_of(row.values, "prompt_ids", where=row.where)
    ids = [ids_of(turn, "ids", where=row.where) for turn in row.values["turns"]]
    if not any(ids):
        return [], []
    if not prompt or not all(ids):
        missing = "prompt_ids" if all(ids) else "of all of them"
        raise BadRow(row.where, f"it has ids of its turns, but not {missing}.", "Give both, or leave the ids out.")
    return prompt, ids


def _sampled(turns: Sequence[tuple[str, str]], prompt: list[int], ids: Sequence[Sequence[int]]) -> SampledIds:
    mask = [role == "policy" for (role, _), own in zip(turns, ids, strict=True) for _ in own]
    ends = zip(accumulate(map(len, ids)), accumulate(len(text) for _, text in turns), strict=True)
    return SampledIds(prompt, [i for own in ids for i in own], mask, [*ends])
