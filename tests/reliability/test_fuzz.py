"""Whatever is typed, configured or lies in a file: exit status 0, 1, 2 or 130, no traceback, no hang, no control character.

Each call is made from a seed: a command with options that mostly fit, a configuration, a data file or the run.json of a
stranger, with values that do not.
"""

import json
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from forks import Done, Forks, processes_in
from rlvr_cli.config import config_of
from rlvr_cli.config.parsing.options import flag, options, value_type
from rlvr_cli.text import printable

STATUSES = (0, 1, 2, 130)
LIMIT = 90.0  # seconds on a loaded machine after which a call counts as hung
AT_ONCE = 2  # calls

NUMBERS = (
    "0", "1", "2", "-1", "-0", "+1", "1.5", "1e3", "1e-9", "1e-400", "1e308", "1e999", "nan", "-inf", "", " ", "x", "²", "１",
    "1_0", "0x1", "9" * 18, "9" * 400, "9" * 5000, str(2**31), str(2**63), str(-(2**63)), "True", "1;2", "1,5", "1\n",
)  # fmt: skip
TEXTS = (
    "", " ", "x", "é", "数学", "\x1b[2J\x07", "\u202e\u2066x", "\udcff\udcfe", "a" * 300, "a" * 5000, "/".join(["d"] * 3000),
    "../x", "-rf", "--", "-", "/", ".", "..", "~", "*", "a\nb\tc", "a\rb", "%s%n", "{}", "[]", "null", "$(id)", "`id`", "'\"",
    "'; drop table rollouts; --", "[link=x]y[/link]", ":smile:", "x.py:f", ":f", "f.py:", "f.py:f:g", "hf:", "hf:x", "hf:../../x",
    "arithmetic:", "arithmetic:-1", "arithmetic:0", "arithmetic:x", "arithmetic:4:x", "arithmetic:4:-1:2", "countdown:2",
    "data.jsonl", "data.csv", "data.parquet", "data.json", "folder", "folder/data.jsonl", "missing.jsonl", "r", "runs/r", "g",
    "runs/g", "runs", "r,g", "r,r", "r=", "select", "summary", "compare", "report", "http://[", "http://h:x", "https://",
)  # fmt: skip
# Values with which a correct command works for long: these options keep the value that the base gives them.
SCALE = {
    "num_samples", "limit", "sampling_max_tokens", "sampling_min_tokens", "dataset", "eval_dataset", "engine", "max_batch_size",
    "grader_workers", "base_url", "check_dataset", "dry_run", "request_timeout", "resume", "config", "preset",
}  # fmt: skip
SQL = (
    "select 1", "select * from rollouts", "select", "select 1; select 2", "update extensions", "select $x", "select '\ud800'",
    "select * from nothing", "select 1/0", "select repeat('x', 100)", "copy rollouts to 'x'", "pragma version", "call x()",
    "select * from runs", "select * from metrics", "with a as (select 1) select * from a", "select chr(27) || chr(8238)",
    "(" * 200, "select" + " (" * 100, "explain select 1", "-- x", "select [1,2], {'a': 1}, null, 'NaN'::double",
)  # fmt: skip
FORMATS = ("table", "json", "csv", "markdown", "xml", "")


@dataclass
class Case:
    """A call of `rlvr`, and what it finds in its directory beside the runs."""

    arguments: list[str]
    files: dict[str, bytes] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)  # for `Forks.start`


def option_words(draw: random.Random, command: str, *, spare: set[str]) -> list[str]:
    """One option of the command with a value that may not fit."""
    option = draw.choice([o for o in options(config_of(command)) if not o.metadata["argument"]])
    kind, _, choices, _ = value_type(option)
    if option.name in spare:
        return []
    if kind is bool:
        return [flag(option.name)] if draw.random() < 0.9 else [f"{flag(option.name)}=x"]
    pool = TEXTS if kind is str and draw.random() < 0.8 else NUMBERS
    value = draw.choice([*choices, draw.choice(pool)]) if choices else draw.choice(pool)
    return [flag(option.name), value] if draw.random() < 0.8 else [f"{flag(option.name)}={value}"]


def words_for(draw: random.Random) -> list[str]:
    """A command whose options mostly fit."""
    run = draw.choice(["r", "g", "runs/r", "g", draw.choice(TEXTS)])
    command = draw.choice(("analyze", "analyze", "filter", "grade", "check", "eval", "sft", "ei", "grpo", "quickstart"))
    sampled = ["--limit", "2", "--sampling-max-tokens", "3", "--sampling-min-tokens", "1", "--dataset", "arithmetic:4"]
    trained = ["--dry-run", "--dataset", "arithmetic:64", "--eval-dataset", "arithmetic:4"]
    base = {
        "analyze": [draw.choice((*SQL, "summary", "failures", "curves", "report", "compare", draw.choice(TEXTS))), run],
        "filter": [
            draw.choice((run, "data.jsonl", "arithmetic:8", "folder")),
            "--out",
            draw.choice(("x.jsonl", "x.parquet", "x.txt")),
        ],
        "grade": [run, "--grader", draw.choice(("gsm8k", "math_verify", "r1_zero", "f.py:f"))],
        "check": [run],
        "eval": draw.choice(
            (sampled, ["--check-dataset", "--dataset", draw.choice(("data.jsonl", "data.csv", "arithmetic:4"))])
        ),
        "sft": trained,
        "ei": trained,
        "grpo": trained,
        "quickstart": ["--runs-dir", "runs/r/run.json"],  # a file: it never starts
    }[command]
    words = [command, *base]
    spare = SCALE if command in ("eval", "sft", "ei", "grpo") else {"runs_dir"} if command == "quickstart" else set()
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        words += option_words(draw, command, spare=spare)
    return words


def typed(draw: random.Random) -> Case:
    """A command line, now and then one that is no command."""
    words = words_for(draw)
    if draw.random() < 0.15:
        words.insert(draw.randrange(len(words) + 1), draw.choice(TEXTS))
    if draw.random() < 0.1:
        words.pop(draw.randrange(len(words)))
    if draw.random() < 0.05:
        words += [draw.choice(("--help", "--help-all", "-h", "--version"))]
    if words[:1] in (["sft"], ["ei"], ["grpo"]) and "--dry-run" not in words:
        words.insert(1, "--dry-run")
    if words[:1] == ["quickstart"] and "runs/r/run.json" not in words:
        words = ["quickstart", "--help"]
    return Case(words)


def configured(draw: random.Random) -> Case:
    """A TOML file that may be none, or has values of other types."""
    command = draw.choice(("eval", "sft", "ei", "grpo"))
    lines = []
    for option in draw.choices(options(config_of(command)), k=draw.randint(1, 3)):
        if option.name in SCALE:
            continue
        value = draw.choice(
            ('"x"', "1", "-1", "1.5", "true", "[]", '["a", "b"]', "[1]", "{}", "nan", "-inf", "1e400", '"\\u0000"', '"\\ud800"', "1979-05-27",
             str(2**63), "9" * 5000, json.dumps(draw.choice(TEXTS)), "'''\n'''", '"\\u202e"')
        )  # fmt: skip
        name = draw.choice((option.name, option.name.replace("_", "-"), option.name.upper(), f'"{option.name}"'))
        lines.append(f"{name} = {value}")
    text = draw.choice(("", f"[{command}]\n", "[[eval]]\n", "[x]\n", "\ufeff", "a.b = 1\n", "\0", "= 1\n")) + "\n".join(
        lines
    )
    if draw.random() < 0.1:
        text = draw.choice(
            ("a = " + "[" * 50_000, "[" * 5000, "a." * 5000 + "b = 1", "a = " + "{a = " * 3000, '"' * 1000, "x")
        )
    small = ["--check-dataset"] if command == "eval" else ["--dry-run"]
    data = text.encode("utf-8", "surrogatepass") if draw.random() < 0.95 else text.encode("utf-16", "surrogatepass")
    return Case([command, "--config", "c.toml", *small, "--dataset", "arithmetic:64"], {"c.toml": data})


def with_data(draw: random.Random) -> Case:
    """A data file, a prompt or a grader with odd content."""
    texts = [
        "2",
        "é",
        "\ud800",
        "\x1b]0;x\x07",
        "\u202e",
        "x" * 20_000,
        "",
        "{question}",
        "1" * 5000,
        "\\frac{" * 500,
        "(" * 2000,
    ]

    def value() -> Any:
        return draw.choice([*texts, None, 1, 1.5, True, [], {}, float("nan"), 10**400, ["a"], {"a": 1}])

    rows = [
        {draw.choice(("question", "problem", "q")): value(), draw.choice(("answer", "ground_truth", "a")): value()}
        for _ in range(3)
    ]
    if draw.random() < 0.5:
        rows = [{"question": draw.choice(texts), "answer": draw.choice(texts)} for _ in range(3)]
    lines = "\n".join(json.dumps(row) for row in rows)
    data = draw.choice(
        (
            lines,
            lines,
            lines,
            f"\ufeff{lines}",
            f"{lines}\n{{",
            lines[:-3],
            f"\0{lines}",
            lines.replace('"', "'"),
            "[" * 100_000,
            "",
            "null",
            "5",
        )
    ).encode()
    if draw.random() < 0.1:
        data = data[: len(data) // 2] + draw.choice((b"\xff\xfe", b"\x80", b"\xed\xa0\x80")) + data[len(data) // 2 :]
    name = draw.choice(("d.jsonl", "d.json", "d.csv", "d.parquet"))
    where = [*(["--skip-bad-lines"] if draw.random() < 0.3 else []), "--dataset", name]
    prompt = draw.choice(
        ("{question}", "{question", "{x}{question}{answer}", "", "{question}\ud800", "{0.__class__}{question}")
    )
    files = {name: data, "p.txt": prompt.encode("utf-8", "surrogatepass")}
    return Case(
        draw.choice((
            ["eval", "--check-dataset", *where],
            ["eval", "--limit", "2", "--sampling-max-tokens", "2", "--sampling-min-tokens", "1", "--prompt", "p.txt", *where],
            ["sft", "--dry-run", *where],
            ["grpo", "--dry-run", "--rollout-batch-size", "8", "--train-batch-size", "8", "--gradient-accumulation-steps", "1", *where],
            ["filter", name, "--out", "x.jsonl"],
        )),
        files,
    )  # fmt: skip


def of_a_stranger(draw: random.Random) -> Case:
    """A run whose run.json someone else has written; FIELDS are set in the copy that the call gets."""
    values: list[Any] = [
        None,
        1,
        -1,
        1.5,
        True,
        "",
        "x",
        "\ud800",
        "\x1b[2J",
        "\u202e",
        "a" * 5000,
        [],
        {},
        [1],
        {"a": 1},
        "1e999",
        10**30,
        "../x",
    ]
    paths = (
        "config", "facts", "sources", "environment", "sampler", "wall_seconds", "seed", "updated_at", "created_at", "status", "command",
        "run_id", "schema_version", "updates", "facts.dataset", "facts.model", "facts.model.name", "facts.prompt", "facts.prompt.text",
        "facts.prompt.name", "facts.grader", "facts.engine", "facts.dataset.fingerprint", "config.model", "config.seed", "config.stop",
        "config.num_samples", "config.prompt", "config.dataset", "config.grader", "config.api_key_env", "config.base_url", "config.limit",
        "environment.argv", "environment.packages", "environment.gpus", "sampler.notes", "committed", "sha256", "model_files",
    )  # fmt: skip
    changes = [(draw.choice(paths), draw.choice(values)) for _ in range(draw.choice((1, 1, 2)))]
    words = draw.choice((
        ["analyze", "summary", "s"], ["analyze", "report", "s"], ["analyze", "select * from runs", "s", "--format", draw.choice(FORMATS[:4])],
        ["analyze", "config_diff", "r", "s"], ["analyze", "compare", "r", "s"], ["analyze"], ["check", "s"], ["grade", "s", "--grader", "gsm8k"],
        ["filter", "s", "--out", "x.jsonl"], ["eval", "--resume", "s"], ["sft", "--resume", "s"], ["grpo", "--resume", "s"],
    ))  # fmt: skip
    return Case(list(words), {"changes": json.dumps(changes).encode()})


def around(draw: random.Random) -> Case:
    """Odd environments and standard streams."""
    case = Case(words_for(draw))
    names = (
        "COLUMNS",
        "LINES",
        "TERM",
        "LC_ALL",
        "LANG",
        "PAGER",
        "NO_COLOR",
        "FORCE_COLOR",
        "TMPDIR",
        "HOME",
        "PYTHONIOENCODING",
        "RLVR_X",
    )
    case.environment = {
        name: draw.choice(("", "0", "-1", "x", "9" * 30, "C", "dumb", "\x1b", "/missing"))
        for name in draw.choices(names, k=2)
    }
    if draw.random() < 0.6:
        case.how = draw.choice(
            (
                {"closed": [1]},
                {"closed": [2]},
                {"closed": [0]},
                {"closed": [0, 1, 2]},
                {"out": "/dev/full"},
                {"out": "/dev/null"},
            )
        )
    return case


KINDS: dict[str, tuple[Callable[[random.Random], Case], int]] = {  # with their shares
    "command lines": (typed, 6),
    "configurations": (configured, 3),
    "data files": (with_data, 2),
    "run.json of strangers": (of_a_stranger, 2),
    "environments": (around, 1),
}


@pytest.fixture(scope="module")
def template(forks: Forks, tmp_path_factory) -> Path:
    """A directory with an evaluation `r`, a training run `g`, and data."""
    folder = tmp_path_factory.mktemp("template")
    small = ["--dataset", "arithmetic:8", "--sampling-max-tokens", "6"]
    assert forks.run("eval", *small, "--run", "r", cwd=folder).status == 0
    train = (
        "--n-grpo-steps 2 --rollout-batch-size 8 --group-size 4 --train-batch-size 8 --gradient-accumulation-steps 1"
    )
    assert forks.run("grpo", *small, *train.split(), "--eval-examples", "4", "--run", "g", cwd=folder).status == 0
    shutil.rmtree(folder / "runs/g/checkpoints")
    shutil.rmtree(folder / "runs/g/model")
    (folder / "data.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' * 3)
    (folder / "data.csv").write_text("question,answer\n1+1?,2\n")
    (folder / "f.py").write_text("def f(response, truth):\n    return float(len(response) % 2)\n")
    (folder / "folder").mkdir()
    return folder


def prepare(template: Path, folder: Path, case: Case) -> None:
    shutil.copytree(template, folder, symlinks=True)
    changes = json.loads(case.files.pop("changes", b"[]"))
    if changes:
        shutil.copytree(folder / "runs/r", folder / "runs/s")
        path = folder / "runs/s/run.json"
        content = json.loads(path.read_text())
        content["run_id"] = "s"
        content.pop("sha256", None)
        for place, value in changes:
            *parents, name = place.split(".")
            inner = content
            for parent in parents:
                inner = inner.get(parent) if isinstance(inner, dict) else None
            if isinstance(inner, dict):
                inner[name] = value
        path.write_text(json.dumps(content).replace('"1e999"', "1e999"))
    for name, data in case.files.items():
        (folder / name).write_bytes(data)


def complain(done: Done, folder: Path) -> Iterator[str]:
    if done.hung:
        yield f"hung: {done.said[-300:]}"
    elif done.status not in STATUSES:
        yield f"status {done.status}"
    if "Traceback" in done.said or re.search(r"^[\w.]*Error: ", done.err, re.MULTILINE):
        yield done.err[-1500:]
    if printable(done.said) != done.said:
        yield "a control character in the output"
    if done.status in (1, 2) and "error: " not in done.err and done.err:
        yield f"no error: {done.err[-300:]}"
    if left := processes_in(folder):
        yield f"left behind: {left}"


def fuzz(
    forks: Forks, template: Path, root: Path, *, calls: int, seed: int
) -> tuple[dict[str, list[str]], Counter[str]]:
    """Make the calls; what is wrong, and how many there were of each kind."""
    shares = [share for _, share in KINDS.values()]
    wrong: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    for first in range(0, calls, AT_ONCE):
        under_way = []
        for number in range(first, min(first + AT_ONCE, calls)):
            draw = random.Random(f"{seed}-{number}")
            kind = draw.choices(list(KINDS), weights=shares)[0]
            case, folder = KINDS[kind][0](draw), root / str(number)
            counts[kind] += 1
            words = f"{seed}-{number} {kind}: {' '.join(case.arguments)[:400]!r} {str(case.files)[:600]} {case.environment} {case.how}"
            prepare(template, folder, case)
            under_way.append(
                (words, folder, forks.start(*case.arguments, cwd=folder, environment=case.environment, **case.how))
            )
        for words, folder, call in under_way:
            done = forks.wait(call, limit=LIMIT)
            if problems := list(complain(done, folder)):
                wrong[words] = problems
            shutil.rmtree(folder)
    return wrong, counts


def test_odd_input_gives_an_error_and_never_a_traceback(forks: Forks, template: Path, tmp_path: Path):
    wrong, _ = fuzz(forks, template, tmp_path, calls=int(os.environ.get("RLVR_FUZZ_CALLS", "6")), seed=1)
    assert not wrong


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_3000_odd_inputs(forks: Forks, template: Path, tmp_path: Path, figures: dict, seed: int):
    wrong, counts = fuzz(forks, template, tmp_path, calls=310, seed=100 + seed)
    assert not wrong
    figures |= {"calls": counts.total(), **counts, "tracebacks, hangs": 0}
