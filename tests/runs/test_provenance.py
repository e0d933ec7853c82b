import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from factories import a_rollout
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.runs.provenance import environment, open_run, redact_argv, resumed_config


def test_environment_is_json_and_records_the_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["rlvr", "eval", "--api-key", "canary"])
    found = environment()
    assert "canary" not in json.dumps(found)
    assert found["argv"] == ["rlvr", "eval", "--api-key", "***"]
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["packages"]["pyarrow"] == pa.__version__
    assert "vllm" in found["packages"]
    assert found["cpus"] >= 1
    assert found["memory_bytes"] > 2**20
    monkeypatch.chdir(tmp_path)
    assert (environment()["git_revision"], environment()["git_dirty"]) == (None, None)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_environment_has_the_git_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def git(*arguments: str) -> str:
        names = ["-c", "user.name=n", "-c", "user.email=e"]
        return subprocess.run(["git", *names, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-qm", "m")
    found = environment()
    assert (found["git_revision"], found["git_dirty"]) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "f").write_text("22")
    assert environment()["git_dirty"] is True


def test_secrets_are_redacted_from_the_command_line():
    given_and_shown = [
        (["--api-key", "S"], ["--api-key", "***"]),
        (["--api-key=S"], ["--api-key=***"]),
        (["--openai_api_key=S"], ["--openai_api_key=***"]),
        (["--token", "S", "x"], ["--token", "***", "x"]),
        (["--hf-token", "-S"], ["--hf-token", "***"]),
        (["--password", "--verbose"], ["--password", "--verbose"]),
        (["OPENAI_API_KEY=S"], ["OPENAI_API_KEY=***"]),
        (["--base-url", "https://user:S@host/v1?token=S&n=3"], ["--base-url", "https://***@host/v1?token=***&n=3"]),
        (["https://S@host"], ["https://***@host"]),
        (["--header=x-secret=S"], ["--header=x-secret=***"]),
        (["client-secret=S;mode=1"], ["client-secret=***;mode=1"]),
        (["--max-tokens", "1024"], ["--max-tokens", "1024"]),
        (["--sampling-min-tokens=4"], ["--sampling-min-tokens=4"]),
        (["--tokenizer", "path", "--keyword", "x"], ["--tokenizer", "path", "--keyword", "x"]),
        (["select key from t where a = 1"], ["select key from t where a = 1"]),
        (["user@host:/path"], ["user@host:/path"]),
        (["--base-url", "sk-abcdefgh12345"], ["--base-url", "***"]),
        (["--model", "sk-experiments-large"], ["--model", "sk-experiments-large"]),
    ]
    for arguments, shown in given_and_shown:
        assert redact_argv(arguments) == shown


def test_another_engine_goes_on_and_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = EvalConfig(runs_dir=str(tmp_path), run="r")
    again = EvalConfig(runs_dir=str(tmp_path), resume="r")

    def session(given: EvalConfig, engine: str, step: int) -> tuple[str, object]:
        with open_run(given, command="eval", facts={"engine": engine, "grader": "r1_zero"}) as run:
            run.commit_rollouts("eval", step, [a_rollout(run_id="r", phase="eval", step=step)])
        return capsys.readouterr().err, run.metadata.get("engines")

    assert session(config, "transformers", 0) == ("", None)
    assert session(again, "transformers", 1) == ("", None)
    said, engines = session(again, "vllm-servers", 2)
    assert said.startswith(
        "note: it goes on with the engine vllm-servers instead of transformers: samples are a function of"
    )
    first = [{"from_rollout": 0, "engine": "transformers"}, {"from_rollout": 2, "engine": "vllm-servers"}]
    assert engines == first
    assert session(again, "vllm-servers", 3) == ("", first)
    assert session(again, "transformers", 4)[1] == [*first, {"from_rollout": 4, "engine": "transformers"}]
    with (
        pytest.raises(RlvrError, match="its grader  was 'r1_zero', now is 'math_verify'"),
        open_run(again, command="eval", facts={"engine": "vllm", "grader": "math_verify"}),
    ):
        pass


def test_a_run_of_verifiers_that_names_a_grader_and_no_files_goes_on(tmp_path: Path):
    began = {"grader": "r1_zero", "environment": {"name": "verifiers:a", "sha256": []}}
    files = {"files": ["a.py"], "sha256": ["0" * 64]}
    now = {"grader": "environment", "environment": {"name": "verifiers:a", **files}}
    with open_run(EvalConfig(runs_dir=str(tmp_path), run="r"), command="eval", facts=began):
        pass
    with open_run(EvalConfig(runs_dir=str(tmp_path), resume="r"), command="eval", facts=now) as run:
        assert run.metadata["facts"] == began
    other = {"grader": "environment", "environment": {"name": "verifiers:b", **files}}
    with (
        pytest.raises(RlvrError, match="environment name was 'verifiers:a', now is 'verifiers:b'"),
        open_run(EvalConfig(runs_dir=str(tmp_path), resume="r"), command="eval", facts=other),
    ):
        pass


def test_limits_given_to_a_resumed_run_are_stored_and_the_next_resume_has_them(tmp_path: Path):
    def stored(**flags: str) -> tuple[str, str]:
        flags = {"runs_dir": str(tmp_path), **flags}
        config = resumed_config(resolve(SftConfig, flags=flags, command="sft"), command="sft")
        with open_run(config, command="sft", facts={}) as run:
            options = run.metadata["config"]
        return options["time_limit"], options["stop_when"]

    assert stored(run="r", time_limit="4h") == ("4h", "never")
    assert stored(resume="r", time_limit="6h", stop_when="diverged") == ("6h", "diverged")
    assert stored(resume="r") == ("6h", "diverged")
    assert stored(resume="r", time_limit="") == ("", "diverged")


def test_a_run_of_a_sweep_goes_on_by_its_name_below_the_directory_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its own directory of runs is that of the sweep."""
    monkeypatch.chdir(tmp_path)
    began = resolve(SftConfig, flags={"run": "a", "runs_dir": "runs/mine"}, command="sft")
    with open_run(began, command="sft", facts={}):
        pass
    config = resumed_config(resolve(SftConfig, flags={"resume": "mine/a"}, command="sft"), command="sft")
    with open_run(config, command="sft", facts={}) as run:
        assert run.path == Path("runs/mine/a")


def test_a_run_that_was_moved_goes_on_where_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also if another run has been made in its old place, and where it is called by its name."""
    old, new = tmp_path / "old", tmp_path / "new"
    began = resolve(SftConfig, flags={"run": "a", "runs_dir": str(old)}, command="sft")
    with open_run(began, command="sft", facts={}):
        pass
    old.rename(new)
    with open_run(began, command="sft", facts={}):
        pass
    monkeypatch.chdir(new)
    for flags in ({"resume": "a", "runs_dir": "."}, {"resume": "a"}, {"resume": str(new / "a")}):
        config = resumed_config(resolve(SftConfig, flags=flags, command="sft"), command="sft")
        with open_run(config, command="sft", facts={}) as run:
            assert run.path.resolve() == new / "a"


def test_a_secret_of_the_environment_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whichever option holds it; a placeholder is no secret."""
    monkeypatch.setenv("MY_SERVICE_KEY", "abc-1234567890")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    for config, facts in (
        (EvalConfig(model="abc-1234567890", base_url="http://h/v1", runs_dir=str(tmp_path)), {}),
        (EvalConfig(runs_dir=str(tmp_path)), {"prompt": {"text": "{question} abc-1234567890"}}),
    ):
        with (
            pytest.raises(RlvrError, match="secret that is in MY_SERVICE_KEY") as raised,
            open_run(config, command="eval", facts=facts),
        ):
            pass
        assert "abc-" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []
    with open_run(EvalConfig(model="none", runs_dir=str(tmp_path), run="r"), command="eval", facts={}):
        pass
    monkeypatch.setattr("sys.argv", ["rlvr", "eval", "--prompt=x abc-1234567890"])
    assert environment()["argv"] == ["rlvr", "eval", "--prompt=x ***"]


def test_an_interrupted_run_is_resumed_by_the_command_that_it_names(tmp_path: Path):
    """Also where a shell would take the path for two words."""
    runs = tmp_path / "my runs"
    with (
        pytest.raises(Interrupted, match="finished work is kept") as raised,
        open_run(EvalConfig(runs_dir=str(runs), run="r"), command="eval", facts={}),
    ):
        raise KeyboardInterrupt
    command = str(raised.value).partition("resume with: ")[2]
    assert shlex.split(command) == ["rlvr", "eval", "--resume", str(runs / "r")]
