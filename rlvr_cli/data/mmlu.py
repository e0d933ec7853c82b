"""MMLU as it was first released: a folder of CSV files without a header, one per subject and split.

Enters: `mmlu:FOLDER` and a split. Leaves: rows with `question`, `options`, `answer` and `subject`, the subjects in turn, so that
the first N rows are of all of them. A file is FOLDER/SPLIT/SUBJECT_SPLIT.csv; its columns are question, options A to D, letter.
"""

import itertools
from collections.abc import Generator, Iterator
from pathlib import Path

from rlvr_cli.data.files import BadRow, Row, file_rows, join_names
from rlvr_cli.errors import RlvrError

MMLU = "mmlu:"
SPLITS = ("dev", "val", "test")
_COLUMNS = ("question", "A", "B", "C", "D", "answer")


def mmlu_rows(folder: Path, split: str) -> Generator[Row | BadRow]:
    """The rows of a split.

    Raises:
        RlvrError: there is no such split, or it has no files.
    """
    if split not in SPLITS:
        raise RlvrError(f"MMLU has no split {split!r}.", f"Its splits are {join_names(SPLITS)}.")
    files = sorted((folder / split).glob(f"*_{split}.csv"))
    if not files:
        raise RlvrError(
            f"There is no file {folder / split}/SUBJECT_{split}.csv.",
            "Name the folder that has the folders dev, val and test of MMLU's original release: --dataset mmlu:FOLDER",
        )
    in_turn = itertools.zip_longest(*([*_of_subject(path, split)] for path in files))  # one file at a time is open
    return (row for turn in in_turn for row in turn if row is not None)


def _of_subject(path: Path, split: str) -> Iterator[Row | BadRow]:
    subject = path.stem.removesuffix(f"_{split}")
    for row in file_rows(path, header=_COLUMNS):
        if isinstance(row, BadRow):
            yield row
            continue
        values = {
            "question": row.values["question"],
            "options": [row.values[letter] or "" for letter in "ABCD"],
            "answer": row.values["answer"],
            "subject": subject.replace("_", " "),
        }
        yield Row(row.where, f"{subject}-{row.number}", values, list(values))
