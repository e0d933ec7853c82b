"""Damage to any file of a run is found by whoever reads it, or it does not change what is read.

Every damage is a mutation of one file: a flipped bit, a cut, zeros, a deletion, bytes of another file, bytes added. Each
reader must refuse and name the file, or say what it says of the intact run. `rlvr check` must name every damaged file.
"""

import hashlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from factories import a_grade, a_rollout
from rlvr_cli.cli import invoke
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import model_facts
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.readers import read_rollouts
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.sums import sums_of
from rlvr_cli.training.checkpoints import check_checkpoints

KINDS = ("flip", "cut", "cut by one", "zero", "empty", "delete", "swap", "append")
EVERYTHING = (
    "select (select md5(string_agg(r::varchar, '|' order by r::varchar)) from rollouts r), "
    "(select md5(string_agg(m::varchar, '|' order by m::varchar)) from metrics m), "
    "(select md5(string_agg(g::varchar, '|' order by g::varchar)) from grades g), (select count(*) from runs)"
)
V1 = Path(__file__).parents[1] / "fixtures/v1/written"
Reader = Callable[[Path], str]


def mutate(path: Path, how: str, other: Path, generator: random.Random) -> None:
    """Damage a file; `other` is another file of the run."""
    data = path.read_bytes()
    match how:
        case "flip":
            place = generator.randrange(len(data))
            data = data[:place] + bytes([data[place] ^ 1 << generator.randrange(8)]) + data[place + 1 :]
        case "cut":
            data = data[: generator.randrange(1, len(data))]
        case "cut by one":
            data = data[:-1]
        case "zero":
            place = generator.randrange(len(data))
            data = data[:place] + bytes(len(data[place : place + 64])) + data[place + 64 :]
        case "empty":
            data = b""
        case "swap":
            data = other.read_bytes()
        case "append":
            data += generator.choice([b"\0", b"x", data[-20:], data.splitlines(keepends=True)[-1]])
    path.unlink()
    if how != "delete":
        path.write_bytes(data)


def files_of(run: Path) -> list[Path]:
    return sorted(p for p in run.rglob("*") if p.is_file() and p.name != ".lock")


def copy_of(run: Path, root: Path) -> Path:
    shutil.rmtree(root, ignore_errors=True)
    return Path(shutil.copytree(run, root / "runs" / run.name))


def said_by(reader: Reader, run: Path, damaged: set[str]) -> str:
    """What the reader says, or REFUSED if it refuses and names one of the damaged files."""
    try:
        return reader(run)
    except RlvrError as error:
        refusal = str(error)
    assert any(name in refusal for name in damaged), f"names none of {damaged}: {refusal}"
    return "REFUSED"


def attack(
    run: Path, root: Path, readers: dict[str, Reader], *, mutations: int, seed: int, kinds: tuple[str, ...] = KINDS
) -> dict[str, int]:
    """Damage a copy of the run in so many ways. Returns how many readings there were, and how many were refused."""
    generator = random.Random(seed)
    intact = {name: reader(copy_of(run, root)) for name, reader in readers.items()}
    relative = [p.relative_to(run) for p in files_of(run)]
    counts = {"mutations": 0, "readings": 0, "refused": 0}
    for number in range(mutations):
        how, file = kinds[number % len(kinds)], relative[generator.randrange(len(relative))]
        other = generator.choice([p for p in relative if (run / p).read_bytes() != (run / file).read_bytes()])
        state = generator.getstate()
        damaged = {file.name, str(other.name)} if how == "swap" else {file.name}
        changed = False
        for name, reader in [("check", check_everything), *readers.items()]:
            generator.setstate(state)
            copy = copy_of(run, root)
            mutate(copy / file, how, copy / other, generator)
            changed = not (copy / file).exists() or (copy / file).read_bytes() != (run / file).read_bytes()
            said = said_by(reader, copy, damaged)
            assert said in ("REFUSED", intact.get(name, "")), f"{name} after {how} of {file}: {said[:300]}"
            counts["readings"] += 1
            counts["refused"] += said == "REFUSED"
            assert name != "check" or said == "REFUSED" or not changed, (how, file)
        counts["mutations"] += changed
    return counts


def check_everything(run: Path) -> str:
    """What `rlvr check` does, with an error for the first problem."""
    problems = check_run(run).problems
    if (run / "checkpoints").exists():
        problems += check_checkpoints(run)[1]
    if problems:
        raise RlvrError(" ".join(problems))
    return ""


def opened(run: Path) -> str:
    with RunDir.annotate(run) as open_run:
        return str(sorted(open_run.committed_keys()))


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command in this process; what it prints on stdout."""

    def call(*words: object) -> str:
        capsys.readouterr()
        invoke([*map(str, words)])
        return capsys.readouterr().out

    return call


@pytest.fixture
def small_run(tmp_path: Path) -> Path:
    """A finished training run with every kind of file, made without a model."""
    with RunDir.create(tmp_path / "made", "grpo", name="r", metadata={"note": "é", "facts": {"model": "m"}}) as run:
        for step in range(3):
            run.commit_rollouts("train", step, [a_rollout(phase="train", step=step, sample_index=i) for i in range(4)])
            run.commit_metrics(step, "train", {"reward/mean": step / 3, "update/tokens": 8.0})
        run.commit_rollouts("eval", 3, [a_rollout(step=3, example_id=f"q{i}") for i in range(4)])
        run.commit_metrics(3, "eval", {"reward/mean": 1.0})
        for folder in ("checkpoints", "model"):
            shutil.copytree(V1 / "grpo" / folder, run.path / folder)
        run.update(model_files=sums_of(run.path / "model"))
    with RunDir.annotate(run.path) as again:
        again.commit_grades("eval", 3, [a_grade(step=3, example_id=f"q{i}") for i in range(4)])
    return run.path


def test_damage_is_found_by_every_reader(small_run: Path, tmp_path: Path, said: Callable[..., str]):
    def filtered(run: Path) -> str:
        said("filter", run, "--out", run.parent / "out.jsonl", "--phase", "all", "--where", "reward = 1")
        return (run.parent / "out.jsonl").read_text()

    readers: dict[str, Reader] = {
        "sql": lambda run: said("analyze", EVERYTHING, run, "--format", "json"),
        "filter": filtered,
        "model": lambda run: model_facts(str(run / "model"))["sha256"],
        "open": opened,
    }
    counts = attack(
        small_run, tmp_path / "copy", readers, mutations=5, seed=1, kinds=("flip", "cut", "delete", "swap", "append")
    )
    assert counts["refused"] > counts["mutations"]


COMMANDS = {
    "eval": "eval --dataset arithmetic:12 --num-samples 2 --sampling-max-tokens 8",
    "sft": "sft --dataset arithmetic:16 --train-batch-size 8 --micro-batch-size 4 --sampling-max-tokens 8 --eval-examples 4 "
    "--checkpoint-every 1",
    "ei": "ei --dataset arithmetic:16 --n-ei-steps 2 --ei-batch-size 4 --group-size 2 --train-batch-size 4 --micro-batch-size 2 "
    "--sampling-max-tokens 8 --eval-examples 4 --checkpoint-every 1",
    "grpo": "grpo --dataset arithmetic:16 --n-grpo-steps 2 --rollout-batch-size 8 --group-size 4 --train-batch-size 8 "
    "--gradient-accumulation-steps 1 --sampling-max-tokens 8 --eval-examples 4 --checkpoint-every 1",
}


@pytest.mark.full
def test_300_damages_to_runs_of_every_command_are_found_by_every_reader(
    tmp_path: Path, said: Callable[..., str], figures: dict[str, object], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name, words in COMMANDS.items():
        said(*words.split(), "--run", name, "--runs-dir", tmp_path / "made")
    said("grade", tmp_path / "made/eval", "--grader", "gsm8k")
    said(*COMMANDS["eval"].split(), "--seed", 1, "--run", "whole", "--runs-dir", tmp_path / "beside")
    whole = tmp_path / "beside/whole"

    def written(run: Path, *words: object) -> str:
        out = run.parent / "out.jsonl"
        said(*words, run, "--out", out)
        return out.read_text()

    def resumed(run: Path) -> str:
        with RunDir.resume(run) as again:
            return str(sorted(again.committed_keys()))

    readers: dict[str, Reader] = {
        "sql": lambda run: said("analyze", EVERYTHING, run, "--format", "json"),
        "summary": lambda run: said("analyze", "summary", run, "--format", "json"),
        "compare": lambda run: said("analyze", "compare", whole, run, "--format", "json") if run.name == "eval" else "",
        "plot": lambda run: said("analyze", "categories", run, "--plot", run.parent / "plot.svg", "--format", "json"),
        "report": lambda run: said("analyze", "report", run, "--out", run.parent / "page.html"),
        "filter": lambda run: written(run, "filter", "--phase", "all", "--where", "reward is not null"),
        "traces": lambda run: str(read_rollouts(run, columns=["response_ids"]).to_pylist()),
        "model": lambda run: model_facts(str(run / "model"))["sha256"] if run.name != "eval" else "",
        "grade": opened,
        "resume": resumed,
    }
    total: dict[str, int] = {}
    for seed, name in enumerate(COMMANDS):
        counts = attack(tmp_path / "made" / name, tmp_path / "copy", readers, mutations=80, seed=seed)
        total = {key: total.get(key, 0) + value for key, value in counts.items()}
    assert total["mutations"] >= 300
    figures |= total | {"silent": 0, "tracebacks": 0}


def test_a_bit_flipped_anywhere_in_the_index_is_found(small_run: Path, tmp_path: Path):
    """Every byte of run.json and of the manifest counts."""
    for name in ("run.json", "manifest.jsonl"):
        copy = copy_of(small_run, tmp_path / "copy")
        data = (copy / name).read_bytes()
        for place in range(0, len(data), 41):
            (copy / name).write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
            assert said_by(check_everything, copy, {name}) == "REFUSED" or b'"sha256"' in data[place - 8 : place + 8]


def test_a_part_that_changes_after_it_was_found_intact_is_checked_again(
    small_run: Path, tmp_path: Path, said: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    import os

    from rlvr_cli.runs.storage import sums

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sums, "_intact", None)
    monkeypatch.setattr(sums, "SETTLED_SECONDS", -1.0)
    part = small_run / "rollouts/train-000001-0000.parquet"
    said("analyze", EVERYTHING, small_run)
    notes = (tmp_path / "cache/rlvr/intact-files").read_text().split()
    assert len(notes) == len(list(small_run.glob("*/*.parquet")))
    state, data = part.stat(), part.read_bytes()
    part.write_bytes(data[:300] + bytes([data[300] ^ 1]) + data[301:])
    os.utime(part, ns=(state.st_atime_ns, state.st_mtime_ns))  # the same size and mtime
    for intact in (sums._intact, None):  # in the same process, and in the next one
        monkeypatch.setattr(sums, "_intact", intact)
        with pytest.raises(RlvrError, match=r"train-000001-0000\.parquet is damaged"):
            said("analyze", EVERYTHING, small_run)
    assert hashlib.sha256(data).hexdigest() in (small_run / "manifest.jsonl").read_text()


def test_intact_files_are_not_read_twice(small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from rlvr_cli.runs.readers import read_run
    from rlvr_cli.runs.storage import sums

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sums, "SETTLED_SECONDS", -1.0)
    paths = {e.path: e.sha256 for e in read_run(small_run).entries if e.path != "metrics.parquet"}
    monkeypatch.setattr(sums, "_intact", None)
    sums.check_sums(small_run, paths)
    monkeypatch.setattr(sums, "_intact", None)
    monkeypatch.setattr(sums, "_checked", lambda *_: pytest.fail("read again"))
    sums.check_sums(small_run, paths)
    monkeypatch.setattr(sums, "_intact", None)
    (tmp_path / "cache/rlvr/intact-files").write_bytes(b"\xff nonsense")  # a damaged cache is no cache
    with pytest.raises(pytest.fail.Exception):
        sums.check_sums(small_run, paths)


def test_the_newest_notes_of_intact_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """There is room for 8 notes, each of a file."""
    from rlvr_cli.runs.storage import sums

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sums, "SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(sums, "MAX_BYTES", 8 * 33)
    names, read, checked = [str(i) for i in range(16)], list[str](), sums._checked
    for name in names:
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(sums, "_checked", lambda run, name, sha256: read.append(name) or checked(run, name, sha256))

    def read_again(some: list[str]) -> list[str]:
        """Which of these files the next process reads."""
        read.clear()
        monkeypatch.setattr(sums, "_intact", None)
        sums.check_sums(tmp_path, {name: hashlib.sha256(name.encode()).hexdigest() for name in some})
        return sorted(read, key=int)

    notes = tmp_path / "cache/rlvr/intact-files"
    for name in names[:9]:
        assert read_again([name]) == [name]
        assert read_again([name]) == []
    assert notes.stat().st_size == 4 * 33  # the older half has gone
    assert read_again(names[5:9]) == []
    notes.write_bytes(b"x" * 500 + b"\n" + notes.read_bytes())  # of a version that let it grow
    assert read_again(names[5:9]) == []
    assert read_again(names) == [*names[:5], *names[9:]]
    assert notes.stat().st_size == 8 * 33
    assert read_again(names[9:]) == []


def test_a_file_that_has_just_changed_is_not_noted(small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from rlvr_cli.runs.storage import sums

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sums, "SETTLED_SECONDS", 3600.0)
    monkeypatch.setattr(sums, "_intact", None)
    part = small_run / "rollouts/train-000001-0000.parquet"
    sums.check_sums(small_run, {"rollouts/train-000001-0000.parquet": hashlib.sha256(part.read_bytes()).hexdigest()})
    assert not (tmp_path / "cache/rlvr/intact-files").exists()
