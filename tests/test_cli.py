"""The command line: every option documented, the list of options frozen, errors that teach, exit statuses that mean something."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlvr_cli.cli import COMMANDS, app
from rlvr_cli.config.options import flag, options

ROOT = Path(__file__).parents[1]


def rlvr(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the real command in a process of its own."""
    import os

    return subprocess.run(
        [sys.executable, "-c", "from rlvr_cli.cli import main; main()", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_in_its_help_under_its_group(command):
    shown = CliRunner().invoke(app, [command, "--help"]).output
    flat = re.sub(r"\s+", " ", shown)
    for option in options(COMMANDS[command]):
        assert option.metadata["help"].strip(), option.name
        assert re.sub(r"\s+", " ", option.metadata["help"][:30]) in flat.replace("- ", "-"), option.name
        if not option.metadata["argument"]:
            assert flag(option.name) in flat
            assert f"{option.metadata['group']}:" in shown


def test_the_options_are_the_ones_agreed_on():
    """The surface cannot grow by accident: a new option is also a line of tests/fixtures/options.txt."""
    now = [f"{name} {flag(o.name)}" for name, config in COMMANDS.items() for o in options(config)]
    assert now == (ROOT / "tests/fixtures/options.txt").read_text().splitlines()


def test_every_readme_command_parses():
    """Each `rlvr ...` line of the README names a command and options that exist."""
    lines = re.findall(r"^(?:\$ )?(?:.*&& )?(rlvr [^#\n&|]*)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(line)
        if words[1] in ("--help", "--version"):
            continue
        known = {flag(o.name) for o in options(COMMANDS[words[1]])} | {"--help"}
        for word in words[2:]:
            if word.startswith("--"):
                assert word.split("=")[0] in known, line


def test_user_errors_exit_1_with_a_hint_and_no_traceback(tmp_path):
    done = rlvr("eval", "--dataset", "arithmatic", cwd=tmp_path)
    assert done.returncode == 1
    assert "arithmatic" in done.stderr
    assert "arithmetic" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())  # nothing was made before the input was found bad


def test_usage_errors_cannot_act_on_the_terminal(tmp_path):
    done = rlvr("eval", "--no\x1b]0;such\x07-option", cwd=tmp_path)
    assert done.returncode == 2
    assert not {"\x1b", "\x07"} & set(done.stderr)


def test_usage_errors_exit_2(tmp_path):
    done = rlvr("eval", "--no-such-option", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_error_text_cannot_act_on_the_terminal(tmp_path):
    done = rlvr("eval", "--dataset", "x\x1b]0;owned\x07.jsonl", cwd=tmp_path)
    assert done.returncode == 1
    assert "\x1b" not in done.stderr + done.stdout
    assert "\x07" not in done.stderr + done.stdout
    assert r"\x1b" in done.stderr


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    command = f"{shlex.quote(sys.executable)} -c 'from rlvr_cli.cli import main; main()' eval --help | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )  # fmt: skip
    assert "Traceback" not in done.stderr


def test_version():
    assert re.fullmatch(r"rlvr \d+\.\d+\.\d+\n", CliRunner().invoke(app, ["--version"]).output)
