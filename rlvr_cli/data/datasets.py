r"""Load a dataset, by name or path, as a list of `Example`s.

Enters: ``arithmetic``, ``countdown``, ``gsm8k`` or ``math`` (recipes in datasets/NAME.toml); the first two also as
``NAME:SIZE[:SEED]``, generated; ``reasoning-gym:FAMILY[,KEY=VALUE...]``;
``verifiers:ID[,KEY=VALUE...]``; ``mmlu:FOLDER``; ``hf:ORG/NAME[:CONFIG]`` from the hub; a .jsonl, .json, .csv or .parquet file; a
directory of such files, one per split. Leaves: examples whose texts can be stored as UTF-8 (a lone surrogate is
escaped), with the SHA-256 of their content. A row that cannot be used is reported as FILE:LINE with its keys; none is
dropped silently.

How a row is read, unless an option names the field:

- question: the first of `QUESTION_FIELDS` that the file has. In a row with a response, ``prompt`` is already formatted,
  as in the handout's sft.jsonl, and goes to the model unchanged.
- answer: the first of `ANSWER_FIELDS`. A worked solution is reduced to its answer: what follows ``####`` on the last
  line, thousands commas removed, else the content of the last balanced ``\boxed{}``. A number stays as it is written.
- ``nums`` (or ``numbers``) and ``target`` without a question are a Countdown puzzle.
- response: ``response``, else ``completion``. SFT also accepts a worked solution with ``####`` or a box in its place.
- ``options`` (or ``choices``): multiple choice. The options go below the question, one a line with its letter; the answer is a
  letter, the place of the right option, from 0, or its text; a number among texts is a place.
- id: ``id``, else ``unique_id``, else the file's stem and the row's number.
"""

import difflib
import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlvr_cli.config.shared.questions import REASONING_GYM, VERIFIERS
from rlvr_cli.data import reasoning_gym
from rlvr_cli.data.examples import SHOWN_BAD_ROWS, Purpose, RowReader, is_prompt
from rlvr_cli.data.files import SUFFIXES, BadRow, Row, file_rows, join_names, stem_of, suffix_of
from rlvr_cli.data.mmlu import MMLU, mmlu_rows
from rlvr_cli.data.packages import verifiers
from rlvr_cli.data.synthetic import SPLITS, arithmetic, check_split, countdown, multiplication
from rlvr_cli.errors import RlvrError, missing_extra
from rlvr_cli.runs.manifest import RUN_FILE
from rlvr_cli.runs.storage.files import typed
from rlvr_cli.text import storable
from rlvr_cli.types import Example, SampledIds

SECONDS_TO_REACH = 10.0  # the hub
_GENERATORS = {"arithmetic": arithmetic, "countdown": countdown, "multiplication": multiplication}


class UnknownDataset(RlvrError):
    """A name is that of no dataset."""


@dataclass(frozen=True)
class Dataset:
    """Examples, and where they came from."""

    name: str  # the spec; of generated data always NAME:SIZE:SEED
    split: str | None  # None for a file
    examples: Sequence[Example]
    fingerprint: str  # SHA-256, hex, of the examples' content: ids, questions, truths, prompts, responses, in order
    source: str
    license: str | None = None  # None: unknown
    default_grader: str | None = None  # None: the prompt decides
    mixed: str = ""  # that some rows alone have a grader of their own: no rule grades all
    num_skipped: int = 0  # bad rows left out
    skipped: list[str] = field(default_factory=list)  # the first of them, "FILE:LINE: what is wrong"; "and N more"
    notes: list[str] = field(default_factory=list)  # shown to the user, such as: answers of mixed form
    too_few: str = ""  # that there are fewer examples than the limit
    shots: dict[str, Any] | None = None  # what precedes each question, if anything does
    question_field: str | None = None  # None: the rows have no field of a question
    trace_of: Mapping[str, str] = field(default_factory=dict)  # example id -> JSON of `RowReader.trace`, if asked for
    sampled: Mapping[str, SampledIds] = field(
        default_factory=dict
    )  # by example id, of episodes whose turns have their ids
    beginnings: Sequence[tuple[int, str]] = ()  # of `beginnings_of`: where in its prompts the shots end

    @property
    def rows(self) -> int:
        return len(self.examples)

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of run.json that identify the dataset."""
        found = {"name": self.name, "rows": self.rows, "fingerprint": self.fingerprint}
        return found if self.shots is None else found | {"shots": self.shots, "beginnings": list(self.beginnings)}


@dataclass(frozen=True)
class Recipe:
    """datasets/NAME.toml: where a built-in dataset's rows come from."""

    name: str
    source: str
    license: str
    training_split: str
    evaluation_split: str
    grader: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)  # split -> file beside the recipe
    hub: Mapping[str, Any] = field(default_factory=dict)  # name, configs, question_field, answer_field, answer_form


@dataclass(frozen=True)
class _Source:
    """Rows to be read, and what is known about them beforehand."""

    name: str
    split: str | None
    rows: Generator[Row | BadRow]
    stem: str  # begins the ids of rows that have no id
    source: str
    license: str | None = None
    grader: str | None = None
    question_field: str | None = None
    answer_field: str | None = None
    answer_form: str | None = None  # "####" or "boxed": every answer must have it


# Loading


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
    needs_answers: bool = True,
    keeps_traces: bool = False,
) -> Dataset:
    """Load questions with their ground truths; see the module's docstring for `spec` and for how a row is read.

    Args:
        split: split of a named dataset or a directory. None or "": the default split for `purpose`.
        limit: number of usable rows to read; later rows are not read. If there are fewer, a note says so.
        question_field: field with the question. None or "": found by name.
        answer_field: field with the answer. None or "": found by name.
        skip_bad_lines: leave bad rows out and list them in `skipped`, instead of raising on the first.
        seed: seed of generated data whose spec names none.
        purpose: "eval" takes the evaluation split, also of generated data, so that no training question is evaluated;
            "train" takes the training split; "traces" takes the training split for SFT: every example has a response
            or a worked solution, and its ground truth may be "".
        needs_answers: whether a grader reads the ground truth of an example; else it may be "".
        keeps_traces: fill `trace_of`, for a copy of the rows that `rlvr sft` can train on as on these.

    Raises:
        RlvrError: an unknown name, an unreadable file, a bad row, no rows, no network, a missing extra.
    """
    split, question_field, answer_field = split or None, question_field or None, answer_field or None
    if not spec:
        raise RlvrError("The dataset has no name.", "Give --dataset a name or a file; '.' is the current directory.")
    if limit is not None and limit < 1:
        raise RlvrError(f"A limit of {limit} leaves no examples.", "Give at least 1.")
    name, *numbers = spec.split(":")
    by_prefix = {REASONING_GYM: _of_reasoning_gym, VERIFIERS: _of_verifiers}
    of_package = next((read for prefix, read in by_prefix.items() if spec.startswith(prefix)), None)
    if of_package or (name in dataset_names() and numbers):
        if question_field or answer_field:
            raise RlvrError(
                f"{spec} is generated: its fields cannot be chosen.", "Leave out --question-field and --answer-field."
            )
        generate = of_package or _generated
        return generate(spec, split, limit=limit, seed=seed, purpose=purpose)
    if name in dataset_names():
        source = _from_recipe(recipe(name), split, purpose=purpose)
    elif spec.startswith(MMLU):
        source = _from_mmlu(spec, split or ("test" if purpose == "eval" else "dev"))
    elif spec.startswith("hf:"):
        source = _from_hub(spec, split, purpose=purpose)
    else:
        source = _from_path(spec, split, purpose=purpose)
    reader = RowReader(
        stem=storable(source.stem),  # a file name may hold bytes that are not UTF-8
        question_field=question_field or source.question_field,
        answer_field=answer_field or source.answer_field,
        answer_form=None if answer_field else source.answer_form,
        prompt_is_question=is_prompt(question_field),
        traces=purpose == "traces",
        needs_answers=needs_answers,
        keeps_traces=keeps_traces,
    )
    with closing(source.rows) as rows:  # else the traceback of an error would keep the file open
        examples, skipped = reader.examples(rows, name=source.name, limit=limit, skip_bad_lines=skip_bad_lines)
    more = len(skipped) - SHOWN_BAD_ROWS
    return Dataset(
        name=storable(source.name),
        split=source.split,
        examples=examples,
        fingerprint=_fingerprint(examples),
        source=storable(source.source),
        license=source.license,
        default_grader=source.grader or reader.grader_of(len(examples)),
        mixed="" if source.grader else reader.mixed(len(examples)),
        question_field=reader.question_field,
        trace_of=reader.trace_of,
        sampled=reader.sampled,
        skipped=[storable(str(bad)) for bad in skipped[:SHOWN_BAD_ROWS]] + ([f"and {more:,} more"] if more > 0 else []),
        num_skipped=len(skipped),
        notes=reader.notes(),
        too_few=_too_few(source.name, len(examples), limit),
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
    package = Path(__file__).parents[1]
    installed = package / "builtin_datasets"  # in a wheel; in a checkout they lie beside the package
    return installed if installed.is_dir() else package.parent / "datasets"


def _generated(spec: str, split: str | None, *, limit: int | None, seed: int, purpose: Purpose) -> Dataset:
    name, *numbers = spec.split(":")
    if name not in _GENERATORS:
        raise RlvrError(
            f"{name} is not generated, so {spec!r} cannot set its size.",
            f"The generated datasets are {join_names(_GENERATORS)}.",
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
        license=made_from.license,
        default_grader=made_from.grader,
        too_few=_too_few(spec, len(examples), limit),
    )


def _of_reasoning_gym(spec: str, split: str | None, *, limit: int | None, seed: int, purpose: Purpose) -> Dataset:
    _check_no_traces(spec, purpose)
    wanted = reasoning_gym.parse(spec, limit=limit, seed=seed)
    training, evaluation = SPLITS
    split = split or (evaluation if purpose == "eval" else training)
    check_split(split)
    examples, notes = reasoning_gym.questions(wanted, split=split, limit=limit)
    return Dataset(
        name=wanted.name,
        split=split,
        examples=examples,
        fingerprint=_fingerprint(examples),
        source=f"generated by reasoning-gym (seed {wanted.seed})",
        license="Apache-2.0",
        default_grader="reasoning_gym",
        notes=notes,
    )


def _of_verifiers(spec: str, split: str | None, *, limit: int | None, seed: int, purpose: Purpose) -> Dataset:
    """The environment's own questions, in its order; `seed` changes nothing."""
    _check_no_traces(spec, purpose)
    training, evaluation = SPLITS
    split = split or (evaluation if purpose == "eval" else training)
    check_split(split)
    examples, notes = verifiers.questions(spec, split=split, limit=limit)
    return Dataset(
        name=spec,
        split=split,
        examples=examples,
        fingerprint=_fingerprint(examples),
        source=f"the environment {verifiers.parse(spec).name} of verifiers",
        notes=notes,
        too_few=_too_few(spec, len(examples), limit or verifiers.parse(spec).size),
    )


def _check_no_traces(spec: str, purpose: Purpose) -> None:
    if purpose == "traces":
        raise RlvrError(
            f"{spec} has questions, and no traces to train on.",
            f"Sample some: rlvr eval --dataset {typed(spec)} --num-samples 8, then rlvr sft --dataset RUN --correct-only.",
        )


def evaluation_spec(spec: str) -> str:
    """The held-out questions of a dataset that is trained on: those of a built-in name, reasoning-gym or verifiers; else empty."""
    if spec.startswith((REASONING_GYM, VERIFIERS)):
        return reasoning_gym.evaluation_spec(spec)
    name = spec.split(":")[0]
    return name if name in dataset_names() else ""


def knows_its_fields(spec: str) -> bool:
    """Whether fields are not to be chosen: a built-in dataset, or one of reasoning-gym or verifiers."""
    return spec.startswith((REASONING_GYM, VERIFIERS)) or spec.split(":")[0] in dataset_names()


def _from_recipe(made_from: Recipe, split: str | None, *, purpose: Purpose) -> _Source:
    split = split or (made_from.evaluation_split if purpose == "eval" else made_from.training_split)
    name = made_from.name
    if made_from.hub:
        rows = _hub_rows(made_from.hub["name"], made_from.hub["configs"], split=split)
    elif split in made_from.files:
        rows = file_rows(_recipes() / made_from.files[split])
    else:
        raise RlvrError(f"{name} has no split {split!r}.", f"Its splits are {join_names(made_from.files)}.")
    return _Source(
        name=name,
        split=split,
        rows=rows,
        stem=f"{name}-{split}",
        source=made_from.source,
        license=made_from.license,
        grader=made_from.grader,
        question_field=made_from.hub.get("question_field"),
        answer_field=made_from.hub.get("answer_field"),
        answer_form=made_from.hub.get("answer_form"),
    )


def _from_mmlu(spec: str, split: str) -> _Source:
    folder = Path(spec.removeprefix(MMLU))
    return _Source(spec, split, mmlu_rows(folder, split), stem=f"mmlu-{split}", source=str(folder), license="MIT")


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
    elif suffix_of(path) not in SUFFIXES:
        raise RlvrError(
            f"{spec}: cannot tell what kind of file this is.", f"Its name must end in {join_names(SUFFIXES)}."
        )
    return _Source(name=spec, split=split, rows=file_rows(path), stem=stem_of(path), source=str(path))


def _split_file(directory: Path, split: str | None, *, purpose: Purpose) -> tuple[Path, str]:
    if (directory / RUN_FILE).exists():
        raise RlvrError(
            f"{directory} is a run, not a dataset.",
            f"To train on the rollouts of a run: rlvr sft --dataset {typed(directory)}",
        )
    files = [path for path in sorted(directory.iterdir()) if suffix_of(path) in SUFFIXES and path.is_file()]
    wanted = [split] if split else ["validation", "test"] if purpose == "eval" else ["train"]
    for name in wanted:
        match [path for path in files if stem_of(path) == name]:
            case [path]:
                return path, name
            case [_, *_] as several:
                raise RlvrError(
                    f"The directory {directory} has several files for {name}.", f"Name one of {join_names(several)}."
                )
    raise RlvrError(
        f"The directory {directory} has no file for the split {' or '.join(wanted)}.",
        f"It has {join_names(stem_of(path) for path in files)}; choose with --split."
        if files
        else "Name a file, or put train.jsonl, validation.jsonl or test.jsonl there.",
    )


def _unknown(spec: str) -> RlvrError:
    names = dataset_names()
    if "/" in spec or "\\" in spec or suffix_of(Path(spec)) in SUFFIXES:
        kind = RlvrError if suffix_of(Path(spec)) in SUFFIXES else UnknownDataset
        return kind(f"There is no file {spec}.", f"The built-in datasets are {join_names(names)}.")
    close = difflib.get_close_matches(spec.partition(":")[0], names, n=1)
    return UnknownDataset(
        f"There is no dataset {spec!r}, neither built in nor as a file.",
        (f"Did you mean {close[0]!r}? " if close else "")
        + f"The built-in datasets are {join_names(names)}; others are hf:ORG/NAME or a file that ends in {join_names(SUFFIXES)}.",
    )


def _too_few(name: str, rows: int, limit: int | None) -> str:
    return f"{name} has only {rows:,} of the {limit:,} examples asked for." if limit and rows < limit else ""


def _fingerprint(examples: Iterable[Example]) -> str:
    digest = hashlib.sha256()
    for e in examples:
        texts = [e.id, e.question, e.ground_truth, e.prompt, e.response, *([e.solution] if e.solution else [])]
        digest.update(json.dumps(texts).encode() + b"\n")
    return digest.hexdigest()


# The hub


def _hub_rows(name: str, configs: Sequence[str | None], *, split: str) -> Generator[Row]:
    """The rows of a hub dataset; several configs take turns, so that the first N rows mix them."""
    try:
        from datasets.exceptions import DatasetsError

        from datasets import config as library  # pyright: ignore[reportAttributeAccessIssue]
        from datasets import load_dataset as fetch  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:  # also if `datasets` is the datasets/ folder of a checkout, which lacks these names
        raise missing_extra("Hugging Face datasets", "hub") from None

    is_local = Path(name).is_dir()  # which `fetch` takes, too
    unreachable = "" if library.HF_HUB_OFFLINE or is_local else _unreachable(library.HF_ENDPOINT)
    if unreachable:
        library.HF_HUB_OFFLINE = True  # what it has in its cache; else it would try to reach the hub for half a minute

    def rows(config: str | None) -> Iterator[Row]:
        try:
            for number, values in enumerate(fetch(name, config, split=split), start=1):  # which decodes the row
                row_name = f"{config}-{number}" if len(configs) > 1 else number
                where = f"{name}{f':{config}' if config else ''} {split} row {number}"
                yield Row(where, row_name, dict(values), list(values), nulls_fill=True)
        except (OSError, ValueError, ImportError, RuntimeError, DatasetsError) as e:
            which = f"{name} ({config})" if config else name
            why = f"{unreachable}, and its cache does not have it" if unreachable else ""
            why = why or " ".join(str(e).split())[:500] or type(e).__name__
            hint = "Check the name (hf:ORG/NAME:CONFIG), --split and the network, or give the path of a file."
            if isinstance(e, ImportError):  # of a column of images or sound
                hint = "Install what is missing, or give the path of a file without such columns."
            if isinstance(e, RuntimeError):  # such as a dataset that is a script
                hint = "Name another copy of the dataset, or give the path of one of its Parquet files."
            raise RlvrError(f"Cannot get the split {split!r} of {which} from the Hugging Face hub: {why}", hint) from e

    taking_turns = itertools.zip_longest(*(rows(config) for config in configs))
    return (row for turn in taking_turns for row in turn if row is not None)


def _unreachable(address: str) -> str:
    """Why a server cannot be reached, by one request; empty if it can, or if that is not known."""
    import socket
    import urllib.request

    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=SECONDS_TO_REACH).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, socket.gaierror | ConnectionError | TimeoutError):
            return f"{address} cannot be reached ({reason.strerror or reason})"
    return ""
