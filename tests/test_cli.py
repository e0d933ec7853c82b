"""The command line: help pages, the list of options, error messages with suggestions, exit statuses."""

import errno
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pytest

from pages import limited_memory
from rlvr_cli import process
from rlvr_cli.cli import COMMANDS, build, invoke, main
from rlvr_cli.config import config_of
from rlvr_cli.config.grpo import LossType
from rlvr_cli.config.parsing.options import flag, options, value_type
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.errors import RlvrError, short_of_resources
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.sweeps.experiment import load_experiment
from rlvr_cli.types import GraderName

ROOT = Path(__file__).parents[1]


def rlvr(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a subprocess."""
    return subprocess.run(
        [sys.executable, "-c", "from rlvr_cli.cli import main; main()", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert invoke(arguments) == 0
    return capsys.readouterr().out


def groups(page: str) -> dict[str, str]:
    """Return the text under each heading of a plain help page."""
    parts = re.split(r"^(\w+):$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_in_the_full_help_under_its_group(capsys, command):
    sections = groups(shown(capsys, command, "--help-all"))
    for option in options(config_of(command)):
        assert option.metadata["help"].strip(), option.name
        text = re.sub(r"\s+", " ", sections["Arguments" if option.metadata["argument"] else option.metadata["group"]])
        name = option.name.upper() if option.metadata["argument"] else flag(option.name)
        assert re.search(rf"(^| ){re.escape(name)} ", text), option.name
        assert re.sub(r"\s+", " ", option.metadata["help"])[:30] in text, option.name


@pytest.mark.parametrize("command", COMMANDS)
def test_the_short_help_lists_common_options_and_counts_the_rest(capsys, command):
    page = shown(capsys, command, "--help")
    knobs = [o for o in options(config_of(command)) if not o.metadata["argument"]]
    listed = set(re.findall(r"^  (--[a-z][a-z0-9-]*)", page, re.MULTILINE)) - {"--help-all"}
    listed = {name for name in listed if not name.startswith("--no-")}
    assert listed == {flag(o.name) for o in knobs if o.metadata["common"]}
    assert 1 <= len(listed) <= 30
    hidden = len(knobs) - len(listed)
    assert (f"{hidden} more options: rlvr {command} --help-all" in page) == (hidden > 0)


def test_help_shows_choices_and_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    page = re.sub(r"\s+", " ", shown(capsys, "grpo", "--help-all")).replace("| ", "|")
    assert "[none|mask|soft_punish] [default: none]" in page
    for names, forms in ((LossType, "FILE.py:FUNCTION"), (GraderName, "FILE.py:FUNCTION|judge:RUBRIC.md")):
        assert f"[{'|'.join(get_args(names))}|{forms}]" in page
    assert "Responses per question. [default: 8]" in page
    assert "[cispo|cs336|dapo|dr-grpo|gspo|kimi-k1.5|leaderboard-4h|quickstart|quickstart-tools|r1-zero]" in page
    assert re.search(r"--stop TEXT .*? \[default: </answer>\]", page)
    assert (
        "--use-std-normalization Divide advantages by the standard deviation of their group. [default: on] --no-use"
        in page
    )


@pytest.mark.parametrize("name", ["loss_type", "grader"])
def test_the_help_names_each_loss_and_grader_once(name):
    """They are listed as choices, so that a list in the text could only go stale."""
    (option,) = (o for o in options(config_of("grpo")) if o.name == name)
    words = re.findall(r"\w+", option.metadata["help"])
    assert "FILE.py:FUNCTION" in value_type(option).forms
    assert not set(words) & set(value_type(option).choices)
    assert "FILE.py" not in option.metadata["help"]


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_option_names_are_never_cut(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    page = shown(capsys, "grpo", "--help-all")
    assert {flag(o.name) for o in options(config_of("grpo"))} <= set(re.findall(r"--[a-z][a-z0-9-]*", page))
    widest = max(len(line) for line in page.partition("more options")[0].partition("Examples:")[0].splitlines())
    assert widest <= max(int(columns), 60) <= 200


def test_on_a_terminal_groups_names_and_defaults_stand_out(capsys, monkeypatch):
    """Without the codes the page is the one that a pipe gets, and so it is with NO_COLOR."""
    monkeypatch.setenv("COLUMNS", "80")
    plain = shown(capsys, "grpo", "--help-all")
    page = on_a_terminal("grpo", "--help-all", columns=80).replace("\r", "")
    assert re.sub(r"\x1b\[[0-9;]*m", "", page) == plain
    bold = re.findall(r"\x1b\[1m([^\x1b]*)\x1b\[0m", page)
    assert {"Data:", "Algorithm:", "Optimization:", "Run:"} <= set(bold)
    names = set(re.findall(r"\x1b\[36m(--[a-z0-9-]*)", page))
    assert {flag(o.name) for o in options(config_of("grpo"))} <= names
    assert "\x1b[2m[default: 8]\x1b[0m" in page
    monkeypatch.setenv("NO_COLOR", "1")
    assert on_a_terminal("grpo", "--help-all", columns=80).replace("\r", "") == plain


def on_a_terminal(*arguments: str, columns: int) -> str:
    import pty

    leader, follower = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", "from rlvr_cli.cli import main; main()", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(columns), "TERM": "xterm-256color"},
        stdout=follower,
    )
    os.close(follower)
    parts = []
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # Linux: the other end is closed
            part = b""
        if not part:
            break
        parts.append(part)
    os.close(leader)
    assert child.wait(timeout=60) == 0
    return b"".join(parts).decode()


def test_the_root_help_builds_no_command():
    """The root help lists one line per command and imports no config, pydantic, rich or torch."""
    code = (
        "import sys\nfrom rlvr_cli.cli import invoke\ninvoke(['--help'])\n"
        "print([m for m in sys.modules if m.startswith('rlvr_cli.config.') or m in ('pydantic', 'rich', 'torch')])"
    )
    wide = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run([sys.executable, "-c", code], env=wide, capture_output=True, text=True, check=True)
    *page, loaded = done.stdout.splitlines()
    for command, line in COMMANDS.items():
        assert any(row.split() == [command, *line.split()] for row in page)
        assert f"rlvr_cli.config.{command}" not in loaded
    assert not [name for name in ("pydantic", "'rich'", "torch") if name in loaded]


@pytest.mark.parametrize("words", ["grpo --help", "runs r s --limit 3 --size"])
def test_no_command_imports_pydantic(tmp_path, words):
    """Typer would, to read values, for which the commands have readers of their own: of arguments, a number, a flag, and nothing."""
    for name in ("r", "s"):
        RunDir.create(tmp_path / "runs", "eval", name=name, metadata={}).close()
    code = f"import sys\nfrom rlvr_cli.cli import invoke\ninvoke({words.split()})\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "pydantic" not in done.stdout.splitlines()[-1].split()


def test_the_help_of_a_command_imports_only_its_own_config():
    code = "import sys\nfrom rlvr_cli.cli import invoke\ninvoke(['sft', '--help'])\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "rlvr_cli.config.sft" in loaded
    assert not {f"rlvr_cli.config.{name}" for name in COMMANDS if name != "sft"} & set(loaded)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_root_help_line_of_a_command_begins_its_own_help(command):
    doc = re.sub(r"\s+", " ", config_of(command).__doc__ or "")
    assert doc.startswith(COMMANDS[command].removesuffix("."))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_ends_with_examples_that_are_commands(capsys, command):
    examples = shown(capsys, command, "--help").partition("Examples:\n")[2].splitlines()
    assert 1 <= len(examples) <= 3
    for example in examples:
        program, name, *words = shlex.split(example)
        assert (program, name) == ("rlvr", command)
        with build(name).make_context(name, words) as context:
            given = {
                k: tuple(v) if isinstance(v, list) else v for k, v in context.params.items() if v not in (None, ())
            }
        resolve(config_of(name), flags={k: v for k, v in given.items() if k != "help_all"}, command=name)


def test_the_list_of_options_is_frozen():
    """A new option must also be added to tests/fixtures/options.txt, so that none appears by accident."""
    now = [f"{name} {flag(o.name)}" for name in COMMANDS for o in options(config_of(name))]
    assert now == (ROOT / "tests/fixtures/options.txt").read_text().splitlines()


def test_every_readme_command_parses():
    """Each `rlvr ...` line of the README names a command and options that exist."""
    lines = re.findall(r"^(?:\$ )?(?:.*&& )?(rlvr [^#\n&|]*)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(line)
        if words[1] in ("--help", "--version"):
            continue
        known = {flag(o.name) for o in options(config_of(words[1]))} | {"--help", "--help-all"}
        if words[1] == "sweep":  # the options of its command, too
            known |= {flag(o.name) for o in options(config_of(load_experiment(words[2]).command))}
        for word in words[2:]:
            if word.startswith("--"):
                assert word.split("=")[0] in known, line


def test_user_errors_exit_1_with_a_hint_and_no_traceback(tmp_path):
    done = rlvr("eval", "--dataset", "arithmatic", cwd=tmp_path)
    assert done.returncode == 1
    assert "arithmatic" in done.stderr
    assert "arithmetic" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())  # the error comes before any file is written


def test_usage_errors_cannot_act_on_the_terminal(tmp_path):
    done = rlvr("eval", "--no\x1b]0;such\x07-option", cwd=tmp_path)
    assert done.returncode == 2
    assert not {"\x1b", "\x07"} & set(done.stderr)


@pytest.mark.parametrize(
    ("line", "status", "says", "hints"),
    [
        # usage errors, found by the parser: exit status 2
        ("eval --no-such-option", 2, "rlvr eval has no option --no-such-option.", "rlvr eval --help-all"),
        ("grpo --learning-rat 1", 2, "no option --learning-rat.", "Did you mean --learning-rate?"),
        ("grpo --lr 1e-5", 2, "no option --lr.", "Did you mean --learning-rate?"),
        ("grpo --lr=1e-5", 2, "no option --lr.", "Did you mean --learning-rate?"),
        ("grpo -lr 1e-5", 2, "no option -lr.", "Did you mean --learning-rate?"),
        ("sft --epochs 3", 2, "no option --epochs.", "Did you mean --sft-epochs?"),
        ("grpo --epochs 3", 2, "no option --epochs.", "Did you mean --epochs-per-rollout-batch?"),
        ("ei --batch-size 3", 2, "no option --batch-size.", "Did you mean --train-batch-size or --max-batch-size?"),
        ("eval --temperature 0", 2, "no option --temperature.", "Did you mean --sampling-temperature?"),
        ("grpo --no-use-std-normalisation", 2, "no option", "Did you mean --use-std-normalization?"),
        ("grop", 2, "There is no command 'grop'.", "Did you mean: rlvr grpo"),
        ("report", 2, "There is no command 'report'.", "Did you mean: rlvr analyze report"),
        ("compare a b", 2, "There is no command 'compare'.", "Did you mean: rlvr analyze compare"),
        ("curves", 2, "There is no command 'curves'.", "Did you mean: rlvr analyze curves"),
        ("xyzzy", 2, "There is no command 'xyzzy'.", "quickstart, eval, sft"),
        ("--seed 3 grpo", 2, "rlvr has no option --seed.", "after the command"),
        ("grpo --seed x", 2, "--seed is 'x'.", "It takes a whole number."),
        ("grpo --seed 1.5", 2, "--seed is '1.5'.", "It takes a whole number."),
        ("grpo --learning-rate fast", 2, "--learning-rate is 'fast'.", "It takes a number."),
        ("grpo --learning-rate nan", 2, "--learning-rate is nan.", "Give a finite number."),
        ("grpo --loss-type grpo-clip", 2, "--loss-type is 'grpo-clip'. Did you mean grpo_clip?", "FILE.py:FUNCTION"),
        ("analyze --format jsn", 2, "--format is 'jsn'. Did you mean json?", "Choose one of table, json"),
        ("filter x --phase tran", 2, "--phase is 'tran'. Did you mean train?", "Choose one of train, eval, all."),
        ("grpo --seed", 2, "Option '--seed' requires an argument.", "rlvr grpo --help"),
        ("grpo extra", 2, "Got unexpected extra argument(s) (extra)", "rlvr grpo --help"),
        ("list", 2, "There is no command 'list'.", "Did you mean: rlvr runs"),
        ("ls", 2, "There is no command 'ls'.", "Did you mean: rlvr runs"),
        ("train", 2, "There is no command 'train'.", "Did you mean: rlvr grpo"),
        ("plot", 2, "There is no command 'plot'.", "Did you mean: rlvr analyze curves RUN --plot"),
        # options that cannot be, wherever they are given: exit status 2
        ("grpo --group-size 0", 2, "--group-size is 0.", "It must be at least 1."),
        (
            "grpo --group-size 7",
            2,
            "--rollout-batch-size 256 is not a multiple of --group-size 7.",
            "or 4 or 8.",
        ),
        ("grpo --rollout-batch-size 999999999999999999 --group-size 10", 2, "is not a multiple of", "or 9 or 11."),
        ("eval --limit 0", 2, "--limit is 0.", "It must be at least 1."),
        ("eval --limit -3", 2, "--limit is -3.", "It must be at least 1."),
        (
            "grpo --time-limit 4",
            2,
            "--time-limit is '4', without a unit.",
            "4h for hours, 4m for minutes, or 4s for seconds",
        ),
        ("grpo --max-grade-errors 2", 2, "--max-grade-errors is 2.0.", "It must be at most 1."),
        ("grade --check mine.py:f", 2, "--check has nothing to grade.", "--dataset arithmetic"),
        ("grade r --check mine.py:f --grader gsm8k", 2, "--check and --grader exclude each other.", "names the grader"),
        ("grade r --grader gsm8k --skip-bad-lines", 2, "--skip-bad-lines needs --check.", "rlvr eval --dataset"),
        ("grade r", 2, "No grader is given.", "r1_zero"),
        ("grade r --grader gsm8k --format-rule lenient", 2, "--format-rule has no effect without", "or leave it out"),
        (
            "grade r --check judge:r.md --format-rule lenient --judge-url http://a/v1 --judge-model m",
            2,
            "--format-rule has no",
            "reasoning_gym",
        ),
        ("eval --grader gsm8k --format-rule lenient", 2, "--format-rule has no effect without", "r1_zero, countdown"),
        ("sft --grader f.py:f --format-rule lenient", 2, "--format-rule has no effect without", "r1_zero, countdown"),
        (
            "grade r --check gsm8k --again",
            2,
            "--again has no effect with --check: no grades are stored.",
            "Leave it out.",
        ),
        ("grade --explain 5 7 --phase eval", 2, "--phase has no effect with --explain: no grades", "Leave it out."),
        ("grade --check gsm8k --grader-workers 4 r", 2, "--grader-workers has no effect with --check", "Leave it out."),
        ("grade --explain 5", 2, "--explain needs one ground truth", "TRUTH"),
        ("distill", 2, "rlvr distill needs a teacher.", "--teacher"),
        ("analyze summary --set k", 2, "--set k has no value.", "--set k=8"),
        ("analyze compare one", 2, "compare needs two runs or more; 1 were given.", "RUN_A RUN_B"),
        ("grade r --grader gsm8k --dataset arithmetic", 2, "--dataset needs --check.", "rlvr eval --dataset"),
        ("grpo --preset quickstat", 2, "no preset 'quickstat'. Did you mean quickstart?", "Its presets:"),
        ("sft --preset dapo", 2, "no preset 'dapo'.", "Its presets: cs336, quickstart, quickstart-tools."),
        # TRL's names, and abbreviations
        ("grpo --model-name x", 2, "no option --model-name.", "Did you mean --model?"),
        ("grpo --max-steps 5", 2, "no option --max-steps.", "Did you mean --n-grpo-steps?"),
        ("grpo --output-dir x", 2, "no option --output-dir.", "Did you mean --run?"),
        ("grpo --num-generations 4", 2, "no option --num-generations.", "Did you mean --group-size?"),
        (
            "analyze curve",
            2,
            "no query named 'curve', nor a run of this name in runs. Did you mean curves?",
            "Named queries:",
        ),
        # errors found later: exit status 1
        ("grpo --dry-run --run ../evil", 1, "'../evil' cannot be the name of a run.", "characters"),
        ("grpo --dry-run --grader mine.py:f", 1, "There is no grader file mine.py.", "Relative paths"),
        ("grpo --dry-run --prompt=", 1, "The prompt has no name.", "Give --prompt"),
        ("grpo --dry-run --dataset=", 1, "The dataset has no name.", "Give --dataset"),
        ("grpo --dry-run --prompt mine.prompt", 1, "There is no prompt 'mine.prompt'", "r1_zero"),
        ("grpo --dry-run --dataset mine.jsonl", 1, "mine.jsonl", ""),
        ("analyze runs/missing", 1, "no query named 'runs/missing', nor a run of this name", "Named queries:"),
        ("grade norun --grader gsm8k", 1, "There is no run 'norun'", "--runs-dir"),
    ],
)
def test_a_mistake_gives_a_two_line_error_with_a_suggestion(tmp_path, capsys, monkeypatch, line, status, says, hints):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rlvr", *shlex.split(line)])
    monkeypatch.setattr(process, "limits_apply", False)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    printed = capsys.readouterr()
    assert printed.out == ""
    first, second = printed.err.splitlines()
    assert first.startswith("error: ")
    assert says in first
    assert second.startswith("  ")
    assert hints in second


def test_short_memory_is_a_two_line_error(tmp_path, capsys, monkeypatch):
    with (tmp_path / "big.toml").open("w") as file:
        file.truncate(1 << 31)
    monkeypatch.setattr(sys, "argv", ["rlvr", "eval", "--config", str(tmp_path / "big.toml")])
    monkeypatch.setattr(process, "limits_apply", False)
    with limited_memory(1 << 28), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: The system refused memory or a thread (MemoryError)."
    assert "ulimit -u" in second


@pytest.mark.parametrize(
    "error",
    [
        pa.ArrowException("Unknown error: Failed to launch worker thread: Resource temporarily unavailable"),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ],
)
def test_what_the_system_refused_is_told_from_other_errors(error):
    assert str(error) in short_of_resources(error).problem
    assert short_of_resources(type(error)("no space")) is None


def test_a_mistyped_run_suggests_similar_runs_and_queries(tmp_path):
    for name in ("q0-grpo", "summaries"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    with pytest.raises(RlvrError, match=r"Did you mean the run q0-grpo\?"):
        invoke(["analyze", "q0-grp", "--runs-dir", str(tmp_path)])
    with pytest.raises(RlvrError, match=r"Did you mean summary, or the run summaries\?"):
        invoke(["analyze", "summar", "--runs-dir", str(tmp_path)])


def test_a_custom_loss_is_accepted():
    """FILE.py:FUNCTION is accepted by --loss-type, but not by options with fixed choices."""
    with build("grpo").make_context("grpo", ["--loss-type", "mine.py:loss"]) as context:
        assert context.params["loss_type"] == "mine.py:loss"
    with pytest.raises(RlvrError, match="Choose one of none, mask, soft_punish"):
        invoke(["grpo", "--overlong", "mine.py:loss"])


def test_values_reach_the_config_as_they_are_typed(monkeypatch):
    seen = []
    monkeypatch.setattr("rlvr_cli.commands.eval.run", seen.append)
    invoke(
        shlex.split("eval --limit 3 --sampling-temperature 1e-1 --stop a --stop '' --no-cuda-graphs --skip-bad-lines")
    )
    invoke(["eval", "--engine", "vllm"])
    first, second = seen
    assert (first.limit, first.sampling_temperature, first.stop) == (3, 0.1, ("a", ""))
    assert (first.cuda_graphs, first.skip_bad_lines) == (False, True)
    given = {k for k, source in first.sources.items() if source == "flag"}
    assert given == {"limit", "sampling_temperature", "stop", "cuda_graphs", "skip_bad_lines"}
    assert (second.engine, second.stop, second.limit) == ("vllm", ("</answer>",), None)
    assert [k for k, source in second.sources.items() if source == "flag"] == ["engine"]


def test_ctrl_c_is_reported_and_exits_130(monkeypatch, capsys):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr("rlvr_cli.commands.store.analyze.run", interrupted)
    monkeypatch.setattr(sys, "argv", ["rlvr", "analyze"])
    monkeypatch.setattr(process, "limits_apply", False)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_error_text_cannot_act_on_the_terminal(tmp_path):
    done = rlvr("eval", "--dataset", "x\x1b]0;owned\x07.jsonl", cwd=tmp_path)
    assert done.returncode == 1
    assert "\x1b" not in done.stderr + done.stdout
    assert "\x07" not in done.stderr + done.stdout
    assert r"\x1b" in done.stderr


def test_a_closed_pipe_is_not_an_error(tmp_path):
    command = f"{shlex.quote(sys.executable)} -c 'from rlvr_cli.cli import main; main()' eval --help | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert done.returncode == 0


def test_version(capsys):
    assert re.fullmatch(r"rlvr \d+\.\d+\.\d+\n", shown(capsys, "--version"))
