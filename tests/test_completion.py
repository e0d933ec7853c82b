"""Shell completion: through the protocol of each shell, and in a real bash."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from rlvr_cli.cli import COMMANDS, main
from rlvr_cli.completion import complete_value
from rlvr_cli.config import config_of
from rlvr_cli.config.grpo import LossType
from rlvr_cli.config.parsing.options import flag, options
from rlvr_cli.config.parsing.sources import preset_names
from rlvr_cli.graders import GRADERS
from rlvr_cli.runs.run_dir import RunDir

ROOT = Path(__file__).parents[1]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Change to a folder with runs, models and files."""
    monkeypatch.chdir(tmp_path)
    for name, command in (("old", "grpo"), ("mid-sft", "sft"), ("new", "grpo")):
        RunDir.create(tmp_path / "runs", command, name=name, metadata={}).close()
    other = tmp_path / "elsewhere" / "far"
    other.mkdir(parents=True)
    (other / "run.json").write_text(json.dumps({"command": "grpo", "status": "failed"}))
    model = tmp_path / "runs" / "old" / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "runs" / "curves.png").write_text("")
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    (tmp_path / "models" / "qwen" / "config.json").write_text("{}")
    (tmp_path / "models" / "nested").mkdir()
    (tmp_path / "models" / ".hidden").mkdir()
    (tmp_path / "my.jsonl").write_text("{}")
    return tmp_path


def offered(line: str, monkeypatch, capsys) -> list[str]:
    """Return the completions of the last word of a line, which may be empty, as bash requests them."""
    words = line.split(" ")
    monkeypatch.setenv("_RLVR_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.err) == (0, "")
    return printed.out.split()


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("rlvr ", list(COMMANDS)),
        ("rlvr gr", ["grpo", "grade"]),
        ("rlvr --inst", ["--install-completion"]),
        ("rlvr grpo --loss", ["--loss-type"]),
        ("rlvr grpo --overlong-", ["--overlong-buffer"]),
        ("rlvr grpo --no-use", ["--no-use-std-normalization"]),
        ("rlvr grpo --help", ["--help-all", "--help"]),
        ("rlvr grpo --loss-type ", list(get_args(LossType))),
        ("rlvr grpo --seed 3 --loss-type grpo_c", ["grpo_clip"]),
        ("rlvr sft --async-steps ", []),  # sft has no such option
        ("rlvr sft --engine ", ["auto", "transformers", "vllm"]),
        ("rlvr eval --engine o", ["openai"]),
        ("rlvr analyze --format ", ["table", "json", "csv", "markdown"]),
        ("rlvr filter --phase ", ["train", "eval", "all"]),
        ("rlvr grpo --preset ", list(preset_names("grpo"))),
        ("rlvr sft --preset c", ["cs336"]),
        ("rlvr grpo --grader ", list(GRADERS)),
        ("rlvr grpo --prompt q", ["question_only"]),
        ("rlvr grpo --dataset gs", ["gsm8k"]),
        ("rlvr grpo --eval-dataset cou", ["countdown"]),
        ("rlvr filter x --decontaminate-against gs", ["gsm8k"]),
        ("rlvr analyze pass", ["pass_at_k"]),
        ("rlvr analyze rep", ["repetitions", "report"]),
        ("rlvr analyze mid", ["mid-sft"]),  # a run in place of a query
        ("rlvr analyze curves ", ["new", "mid-sft", "old"]),
        ("rlvr analyze curves new o", ["old"]),
        ("rlvr analyze compare new,mid-sft old,n", ["old,new"]),
        ("rlvr analyze --runs-dir elsewhere curves ", ["far"]),
        ("rlvr analyze --runs-dir nowhere curves ", []),
        ("rlvr grpo --resume ", ["new", "old"]),  # an sft run cannot be resumed with grpo
        ("rlvr sft --resume ", ["mid-sft"]),
        ("rlvr grpo --runs-dir elsewhere --resume ", ["far"]),
        ("rlvr grade ", ["new", "mid-sft", "old"]),
        ("rlvr filter ne", ["new"]),
        ("rlvr eval --model r", ["runs/old/model", "runs/", "runs/mid-sft/", "runs/new/", "runs/old/"]),
        ("rlvr eval --model models/", ["models/nested/", "models/qwen"]),
        ("rlvr eval --model models/q", ["models/qwen"]),
        ("rlvr eval --model models/.", ["models/.hidden/"]),
        ("rlvr eval --model nowhere/", []),
        ("rlvr eval --run ", []),  # the name of a new run
        ("rlvr grpo --seed ", []),
        ("rlvr grpo --seed x --loss-type grpo_n", ["grpo_no_clip"]),  # an invalid value before it does not matter
    ],
)
def test_completions(here, monkeypatch, capsys, line, values):
    assert offered(line, monkeypatch, capsys) == values


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_name_is_completed(here, monkeypatch, capsys, command):
    """Completion includes options that only --help-all shows."""
    names = offered(f"rlvr {command} --", monkeypatch, capsys)
    assert {flag(o.name) for o in options(config_of(command)) if not o.metadata["argument"]} <= set(names)


def test_every_kind_of_completion_is_implemented(here, monkeypatch):
    kinds = {o.metadata["completes"] for command in COMMANDS for o in options(config_of(command))} - {""}
    assert kinds == {
        "preset",
        "run",
        "run of the command",
        "query",
        "model",
        "dataset",
        "source",
        "prompt",
        "experiment",
        "environment",
    }
    for kind in kinds:
        assert complete_value(kind, command="grpo", given={}, typed="")
    monkeypatch.setenv("HOME", str(here))
    assert complete_value("run", command="grpo", given={"runs_dir": "~/runs"}, typed="")


@pytest.mark.parametrize(
    ("shell", "expected"),
    [("zsh", '"grpo_clip"'), ("fish", "grpo_clip")],
)
def test_completion_for_zsh_and_fish(here, monkeypatch, capsys, shell, expected):
    monkeypatch.setenv("_RLVR_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "rlvr grpo --loss-type grpo_c")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert expected in printed
    assert "no_baseline" not in printed
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "rlvr grpo --kl")
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr().out
    assert "--kl-coef" in printed
    assert "Weight of the KL penalty" in printed


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """An environment with `rlvr` on the path and an empty home directory."""
    program = tmp_path / "bin" / "rlvr"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m rlvr_cli "$@"\n')
    program.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    path = f"{program.parent}:/usr/bin:/bin"
    return {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(home), "LANG": "C.UTF-8"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_a_real_bash_completes(here, environment):
    """Bash loads the script that `--show-completion` prints, and completes three lines."""
    script = """
        rlvr --show-completion > completion.sh; source completion.sh
        complete -p rlvr
        ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _rlvr_completion rlvr; echo "${COMPREPLY[*]}"; }
        ask rlvr gr
        ask rlvr grpo --loss-type grpo_
        ask rlvr eval --model models/
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "complete -o default -F _rlvr_completion rlvr",
        "grpo grade",
        "grpo_clip grpo_no_clip",
        "models/nested/ models/qwen",
    ]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_completion_is_installed_for_the_calling_shell(environment):
    done = subprocess.run(
        ["bash", "--norc", "-c", "rlvr --install-completion; true"], env=environment, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert done.stderr == ""
    home = Path(environment["HOME"])
    assert "bash completion installed" in done.stdout
    assert "_RLVR_COMPLETE=complete_bash" in (home / ".bash_completions" / "rlvr.sh").read_text()
    assert ".bash_completions/rlvr.sh" in (home / ".bashrc").read_text()


@pytest.mark.parametrize(
    ("action", "shell", "holds"),
    [("--show-completion", "fish", "complete --command rlvr"), ("--install-completion", "zsh", "#compdef rlvr")],
)
def test_completion_is_made_for_other_shells(environment, action, shell, holds):
    """The shell is named explicitly, because Typer would detect the shell of the calling process."""
    done = subprocess.run(
        [sys.executable, "-m", "rlvr_cli", action, shell],
        env={**environment, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    made = done.stdout if shell == "fish" else (Path(environment["HOME"]) / ".zfunc/_rlvr").read_text()
    assert holds in made
    assert f"_RLVR_COMPLETE=complete_{shell}" in made
