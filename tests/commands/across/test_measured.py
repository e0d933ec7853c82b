"""What an environment measures of an episode is stored with its row, and can be asked for."""

import pytest

from marks import slow
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.commands import eval as evaluate
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.readers import read_rollouts, read_run
from rlvr_cli.runs.storage.parquet import to_rollouts
from rlvr_cli.types import Measured

MINE = """
from rlvr_cli.environments import Reply

class Counts:
    gives_rewards = True  # without stop strings, each turn is answered

    def begin(self, example, seed):
        self.turns = 0

    def answer(self, turn):
        self.turns += 1
        first = {"first": float(len(turn))} if self.turns == 1 else {}
        return Reply("next", done=self.turns == 2, reward=0.5, measured={**first, "turns": self.turns})

class Infinite(Counts):
    def answer(self, turn):
        return Reply(done=True, reward=1.0, measured={"share": float("inf")})
"""
QUERY = "SELECT m.name, avg(m.value) FROM (SELECT unnest(measured) AS m FROM rollouts) GROUP BY m.name ORDER BY m.name"


@pytest.mark.parametrize("samplers", [slow({}), {"samplers": 2}])
def test_what_an_environment_measures_is_stored_and_can_be_asked_for(forked, samplers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    common = {
        "dataset": "arithmetic:2",
        "environment_workers": 1,
        "sampling_max_tokens": 64,
        "runs_dir": str(tmp_path),
    } | samplers
    evaluate.run(EvalConfig(**common, environment="mine.py:Counts", run="r"))
    rows = to_rollouts(read_rollouts(tmp_path / "r"))
    judged = [row for row in rows if row.episode and row.episode.num_turns == 2]
    assert judged
    for row in judged:
        assert row.turn_facts is not None
        assert row.measured == (Measured("first", float(row.turn_facts.ends[0])), Measured("turns", 2.0))
    assert check_run(tmp_path / "r").problems == []
    with open_runs([read_run(tmp_path / "r")], timeout_seconds=30) as database:
        (_, first), (name, turns) = database.select(QUERY).rows
    assert (name, turns > 1, first > 1) == ("turns", True, True)


def test_what_is_no_number_fails_its_episode(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    options = {
        "dataset": "arithmetic:1",
        "environment_workers": 1,
        "sampling_max_tokens": 8,
        "runs_dir": str(tmp_path),
        "run": "r",
    }
    with pytest.raises(Exception, match="measured 'share' = inf, not a finite number with a name"):
        evaluate.run(EvalConfig(**options, environment="mine.py:Infinite"))
