"""docs/environments.md from start to end: its files and commands as they are printed, by themselves."""

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from checks import findings
from rlvr_cli.runs.readers import read_metadata, read_rollouts

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"
FILE = re.compile(r"^```(?:python|toml)\n(# (\S+\.(?:py|toml))\n.*?)^```$", re.DOTALL | re.MULTILINE)


def printed() -> tuple[dict[str, str], list[list[str]]]:
    """The files that the page shows up to the end of the walkthrough, and the walkthrough's commands."""
    text = PAGE.read_text(encoding="utf-8")
    text = text[: text.index("## Chat models")]
    files = {name: body for body, name in FILE.findall(text)}
    commands = re.findall(r"^\$ (.*)$", text[text.index("### From start to end") :], re.MULTILINE)
    return files, [shlex.split(command) for command in commands]


@pytest.mark.slow
def test_an_environment_of_ones_own_from_start_to_end(tmp_path, forks):
    """The first training is killed after its second update, where the page goes on with a run."""
    files, commands = printed()
    assert {"guess.py", "traces.py", "guess.toml"} <= set(files)
    for name, body in files.items():
        (tmp_path / name).write_text(body)
    assert commands.pop(0) == ["python", "traces.py"]
    subprocess.run([sys.executable, "traces.py"], cwd=tmp_path, check=True)
    assert commands.pop() == ["rlvr", "view"]  # tests/analysis/live
    said: dict[str, str] = {}
    for _, *command in commands:
        killed = command[-2:] == ["--run", "episode"]
        done = forks.run(
            *command, cwd=tmp_path, status=-signal.SIGKILL if killed else 0, fault="updated:2" if killed else ""
        )
        said[" ".join(command[:2])] = done.out
    episode, turns = (tmp_path / "runs" / name for name in ("episode", "turns"))
    for run in (episode, turns):
        assert findings(run) == []
        rows = read_rollouts(run).to_pylist()
        assert {row["grader"] for row in rows} == {"environment"}
        assert max(row["episode"]["num_turns"] for row in rows) > 2
        assert any(row["reward"] == 1 for row in rows if row["phase"] == "train")
        assert all(row["reward"] == sum(r or 0 for r in row["episode"]["turn_rewards"] or ()) for row in rows)
    assert {len(row["turn_advantages"]) > 0 for row in read_rollouts(turns, phase="train").to_pylist()} == {True}
    assert read_metadata(episode)["status"] == read_metadata(turns)["status"] == "finished"
    arms = [line.split() for line in said["analyze compare"].splitlines() if re.match(r"[AB] ", line)]
    assert [arm[1:4] for arm in arms] == [["episode", "4", "40"], ["turns", "4", "40"]]
    page = (tmp_path / "runs/episode/report.html").read_text()
    given = dict(re.findall(r'<th scope="row">([\w.]+)</th>\s*<td><code>(.*?)</code>', page))
    assert (given["facts.grader"], given["facts.environment.name"]) == ("environment", "guess.py:Guess")
