"""`rlvr discover`, end to end: from a task and a proposer to rows, the best program and the homework's files."""

import json
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from endpoint import Endpoint, Reply, error, serving
from forks import Done, Forks
from killed import KILLS
from marks import slow
from rlvr_cli.analysis.queries.run_list import list_runs
from rlvr_cli.analysis.report.build import write_report
from rlvr_cli.analysis.summary import search_tables, summarize
from rlvr_cli.commands.discover import homework
from rlvr_cli.errors import RlvrError
from rlvr_cli.rollouts.requests import request_seed
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir
from searches import AXES, CODE, ROOTS, TOO_NEAR, WRONG, attempts_of, fenced, files_of, write_responses

RESPONSES = [
    "I cannot do that.",  # no code
    fenced(TOO_NEAR),
    fenced(AXES),
    fenced(WRONG),
    fenced(ROOTS),
    f"<think>\n{fenced(CODE)}</think>\n{fenced(AXES)}",  # what was thought is not the answer
    fenced(CODE),
    fenced("points = 3"),
]
KINDS = ["no_code", "invalid_condition", None, "exception", None, None, None, "bad_points"]
SCORES = [0, 0, 22, 0, 220, 22, 582, 0]


def discover(forks: Forks, folder: Path, words: str, *more: str, **how) -> Done:
    return forks.run("discover", *shlex.split(words), *more, cwd=folder, **how)


def replayed(
    forks: Forks, folder: Path, *, run: str, words: str = "", responses: list[str] | None = None, **how
) -> Done:
    """A replay of responses, two in a round."""
    write_responses(folder / "responses.jsonl", RESPONSES if responses is None else responses)
    usual = f"kissing --proposer replay --replay-from responses.jsonl --num-samples 2 --program-timeout 60 --run {run}"
    return discover(forks, folder, f"{usual} {words}", **how)


NOTE_PARTS_READ = """
import os, sys
noted = os.open("read", os.O_WRONLY | os.O_CREAT)
sys.addaudithook(lambda event, given: event == "open" and str(given[0]).endswith(".parquet")
    and not given[2] & os.O_WRONLY and os.write(noted, f"{os.path.basename(given[0])}\\n".encode()))
"""


@pytest.fixture(scope="module")
def whole(forks: Forks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    done = replayed(forks, folder, run="whole", before=NOTE_PARTS_READ)
    assert done.status == 0, done.said
    assert "582" in done.out
    return folder / "runs/whole"


def test_every_attempt_is_a_row(whole: Path):
    rows = attempts_of(whole)
    assert [row["candidate"]["number"] for row in rows] == list(range(8))
    assert [(row["step"], row["sample_index"]) for row in rows] == [(i // 2, i % 2) for i in range(8)]
    assert [row["failure_kind"] for row in rows] == KINDS
    assert [row["reward"] for row in rows] == SCORES
    assert [row["response"] for row in rows] == RESPONSES
    assert [row["candidate"]["num_points"] for row in rows] == [None, 2, 22, None, 220, 22, 582, 0]
    assert rows[5]["candidate"]["same_as"] == 2, "the same program is not run twice"
    assert rows[5]["candidate"]["points_sha256"] == rows[2]["candidate"]["points_sha256"]
    assert "of mine" in rows[3]["candidate"]["error"]
    seeds = [request_seed(0, phase="eval", step=i // 2, example_id="kissing-11", sample_index=i % 2) for i in range(8)]
    assert [row["seed"] for row in rows] == seeds
    ran = [row["candidate"] for row in rows if row["candidate"]["status"] is not None]
    assert len(ran) == 6
    assert all(attempt["layers"] for attempt in ran)
    assert check_run(whole, seed_of=request_seed).problems == []


def test_a_round_reads_no_rows_of_earlier_ones(whole: Path):
    times = Counter((whole.parents[1] / "read").read_text().split())
    reads = [times[part.name] for part in sorted((whole / "rollouts").glob("*.parquet"))]
    assert reads == 4 * [reads[0]]
    assert reads[0] > 0


def test_the_error_of_a_failure_is_in_the_next_prompt_of_its_slot_word_for_word(whole: Path):
    rows = attempts_of(whole)
    assert rows[2]["prompt"].count(rows[0]["candidate"]["error"]) == 1
    assert rows[3]["prompt"].count(rows[1]["candidate"]["error"]) == 1
    assert TOO_NEAR in rows[3]["prompt"]
    assert "Minimum squared distance" in rows[3]["prompt"]
    assert [row["candidate"]["parents"] for row in rows] == [[], [], [0], [1], [2], [2], [4], [4]]
    assert "a score of 220" in rows[6]["prompt"]


def test_the_best_program_stands_alone_and_its_points_are_what_it_gives(whole: Path, forks: Forks):
    points = json.loads((whole / "best/points.json").read_text())
    assert len(points) == 582
    code = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['run_code']()[0]))"
    program = whole / "best/program.py"
    alone = subprocess.run([sys.executable, "-I", "-c", code, program], capture_output=True, text=True, check=True)
    assert json.loads(alone.stdout) == points
    done = discover(forks, whole, f"--verify {program} --dim 11")
    assert (done.status, json.loads(done.out)["num_points"], json.loads(done.out)["validity"]) == (0, 582, 1.0)
    stored = {row["candidate"]["points_sha256"] for row in attempts_of(whole)} - {None}
    stored |= {read_run(whole).metadata["start"]["points_sha256"]}
    assert {path.stem for path in (whole / "points").iterdir()} == stored


def test_damaged_and_missing_points_are_found(whole: Path, tmp_path: Path):
    run = shutil.copytree(whole, tmp_path / "whole")
    assert check_run(run).problems == []
    first, second, *_ = sorted((run / "points").iterdir())
    first.write_text(first.read_text() + " ")
    second.unlink()
    (run / "metrics.parquet").write_bytes(b"cut")
    problems = {first.name: "its sha256 is not its name", second.name: "missing", "metrics.parquet": ""}
    assert len(found := check_run(run).problems) == len(problems)
    for name, said in problems.items():
        assert any(name in problem and said in problem for problem in found), (name, found)


def test_damaged_points_of_the_program_to_start_from_are_found(forks: Forks, tmp_path: Path):
    """A search that goes on needs them."""
    (tmp_path / "mine.py").write_text(ROOTS)
    assert replayed(forks, tmp_path, run="r", words="--start mine.py --target 220").status == 0
    run = tmp_path / "runs/r"
    assert (check_run(run).files, check_run(run).problems) == (1, [])
    [points] = (run / "points").iterdir()
    points.write_text("[]")
    assert [points.name in problem for problem in check_run(run).problems] == [True]
    points.unlink()
    assert [points.name in problem for problem in check_run(run).problems] == [True]


def test_the_homeworks_files(whole: Path):
    log = json.loads((whole / "conversation_log.json").read_text())
    attempts = [attempt for one in log["rounds"] for attempt in one["attempts"]]
    assert [attempt["messages"][1]["content"] for attempt in attempts] == RESPONSES
    assert [attempt["verdict"]["score"] for attempt in attempts] == SCORES
    assert (log["model"], log["start"]["score"]) == ("replay", 22)
    report = (whole / "report.md").read_text()
    for said in ("score of the program to start from: 22", "first valid score: 22 (attempt 2)", "final score: 582 (attempt 6)",
                 "no language model was asked", "no discovery", "| bad_points | 1 |"):  # fmt: skip
        assert said in report, said


def test_the_homework_of_a_search_that_was_moved_is_not_written_into_the_run_that_has_its_place(tmp_path: Path):
    def search() -> None:
        with RunDir.create(tmp_path, "discover", name="r", metadata={}) as run, homework(run):
            run.path.rename(tmp_path / "moved")
            RunDir.create(tmp_path, "discover", name="r", metadata={}).close()
            run.commit_metrics(0, "eval", {"discover/best": 1.0})

    with pytest.raises(RlvrError, match="r was moved or deleted"):
        search()
    assert not (tmp_path / "r/report.md").exists()


@pytest.mark.slow
def test_all_that_reads_runs_reads_a_search(whole: Path, forks: Forks, tmp_path: Path):
    def ask(*words: object) -> str:
        done = forks.run(*words, cwd=tmp_path)
        assert done.status == 0, (words, done.said)
        return done.out

    rows = json.loads(ask("analyze", "attempts", whole, "--format", "json"))
    rows = rows if isinstance(rows, list) else rows["rows"]
    assert [row["best_score"] for row in rows] == [22, 22, 22, 22, 220, 220, 582, 582]
    lineage = json.loads(ask("analyze", "lineage", whole, "--format", "json"))
    lineage = lineage if isinstance(lineage, list) else lineage["rows"]
    assert [row["attempt"] for row in lineage] == [0, 2, 4, 6]
    errors = json.loads(ask("analyze", "attempt_errors", whole, "--format", "json"))
    errors = errors if isinstance(errors, list) else errors["rows"]
    assert {row["failure_kind"]: row["attempts"] for row in errors} == dict.fromkeys(filter(None, KINDS), 1)
    ask("analyze", "attempts", whole, "--plot", "scores.svg")
    for said in ("Scores of the attempts", "best so far", ">attempt<"):
        assert said in (tmp_path / "scores.svg").read_text(), "one panel, with both curves named"
    summary = json.loads(ask("analyze", whole, "--format", "json"))
    assert summary["searches"][0]["valid"] == len([kind for kind in KINDS if kind is None])
    assert {row["k"]: row["best_score_at_k"] for row in summary["best_score_at_k"]}[8] == 582
    assert len(summary["attempt_errors"]) == len(set(filter(None, KINDS)))
    [listed] = json.loads(ask("runs", whole, "--format", "json"))
    assert (listed["done"], listed["best_score"], listed["accuracy"]) == (8, 582, None)
    with pytest.raises(RlvrError, match="is a search with scores"):
        summarize(whole)
    ask("check", whole)
    ask("analyze", "report", whole, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for said in (
        "Where the best program comes from",
        "012901380147",
        "Scores of the attempts",
        "Best score of k attempts",
        "#search",
    ):
        assert said in page, said


# Endpoints


def chat(text: str) -> Reply:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return Reply({"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})


def climber(body: dict) -> Reply:
    """A model that does better than the best program that it is shown, but first makes an error that it corrects when told of it."""
    prompt = body["messages"][0]["content"]
    if "Minimum squared distance" in prompt:
        return chat(fenced(ROOTS))
    if "a score of 220" in prompt:
        return chat(fenced(CODE))
    return chat(fenced(TOO_NEAR))


def asked(forks: Forks, folder: Path, served: Endpoint, words: str = "", **how) -> Done:
    usual = f"kissing --model m --base-url {served.url} --num-samples 1 --request-timeout 20"
    return discover(forks, folder, f"{usual} {words}", **how)


def test_a_model_climbs_by_what_the_verifier_says(forks: Forks, tmp_path: Path):
    pytest.importorskip("aiohttp")

    def unseeded(body: dict) -> Reply:
        return error(400, "Unrecognized request argument supplied: seed") if "seed" in body else climber(body)

    with serving(unseeded) as served:
        done = asked(forks, tmp_path, served, "--rounds 9 --target 582 --run climb")
    assert done.status == 0, done.said
    assert read_run(tmp_path / "runs/climb").metadata["sampler"]["seeding"] == "none"
    rows = attempts_of(tmp_path / "runs/climb")
    assert [row["reward"] for row in rows] == [0, 220, 582], "it stops at the target"
    assert [row["num_prompt_tokens"] + row["num_response_tokens"] for row in rows] == [10, 10, 10]
    assert len(served.bodies) == 1 + 3
    assert len(json.loads((tmp_path / "runs/climb/best/points.json").read_text())) == 582
    assert "start from: 22" in (tmp_path / "runs/climb/report.md").read_text()


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (error(401, "no such key"), "401"),
        pytest.param(Reply({"choices": []}), "no choices", marks=pytest.mark.slow),
        # Of a sampler alone: tests/samplers/test_openai.py.
        pytest.param(Reply("this is no JSON"), "not JSON", marks=pytest.mark.full),
        pytest.param(Reply("", raw=b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n{"), "", marks=pytest.mark.slow),
        pytest.param(Reply({}, wait=600.0), "within 3 s", marks=pytest.mark.slow),
    ],
    ids=["401", "empty choices", "no JSON", "cut stream", "hang"],
)
def test_an_endpoint_that_fails_stops_the_search_and_it_goes_on_later(
    forks: Forks, tmp_path: Path, reply: Reply, said: str
):
    pytest.importorskip("aiohttp")

    def answer(body: dict) -> Reply:
        return reply if len(served.bodies) > 1 else climber(body)

    with serving(answer) as served:
        done = asked(forks, tmp_path, served, "--rounds 3 --run r --request-timeout 3")
        assert done.status == 1, done.said
        assert said in done.err
        assert "Traceback" not in done.said
        assert done.err.count("error:") == 1
        if said == "401":
            assert len(served.bodies) == 2, "a key that is refused is not tried again"
        assert [row["reward"] for row in attempts_of(tmp_path / "runs/r")] == [0]
        served.answer = climber
        bought = len(served.bodies)
        done = discover(forks, tmp_path, "--resume r")
        assert done.status == 0, done.said
        assert len(served.bodies) == bought + 2, "what was bought is not bought again"
    assert [row["reward"] for row in attempts_of(tmp_path / "runs/r")] == [0, 220, 582]


@pytest.mark.slow
def test_a_busy_endpoint_is_asked_again(forks: Forks, tmp_path: Path):
    pytest.importorskip("aiohttp")
    replies = [error(429, "slow down", retry_after="0"), error(500, "oh"), Reply(status=0)]

    def answer(body: dict) -> Reply:
        return replies.pop() if replies else climber(body)

    with serving(answer) as served:
        done = asked(forks, tmp_path, served, "--rounds 1 --run r")
    assert done.status == 0, done.said
    assert [row["reward"] for row in attempts_of(tmp_path / "runs/r")] == [0]
    assert len(served.bodies) == 4


def test_responses_that_arrived_before_a_kill_are_not_bought_again(forks: Forks, tmp_path: Path):
    """Killed while the programs of a round run: the responses are stored, and the round is the same."""
    pytest.importorskip("aiohttp")
    with serving(climber) as served:
        words = "--rounds 1 --num-samples 2 --run r"
        done = asked(forks, tmp_path, served, words, fault="sampled:2")
        assert done.status == -signal.SIGKILL
        held = sum(part.rows for part in read_run(tmp_path / "runs/r").entries if part.folder == "segments")
        assert held == 1
        before = len(served.bodies)
        assert discover(forks, tmp_path, "--resume r").status == 0
        assert len(served.bodies) == before + 1
        assert asked(forks, tmp_path, served, words.replace("run r", "run whole")).status == 0
    rows = {name: attempts_of(tmp_path / f"runs/{name}") for name in ("r", "whole")}
    assert rows["r"] == rows["whole"]


def test_the_key_is_nowhere(forks: Forks, tmp_path: Path):
    pytest.importorskip("aiohttp")
    canary = "sk-canary-4f1d9a77"
    spy = "import os\nraise ValueError(repr(dict(os.environ)) + open('/proc/self/environ').read())"
    with serving(lambda body: chat(f"{canary}\n{fenced(spy)}")) as served:
        done = asked(forks, tmp_path, served, "--rounds 1 --run r", environment={"OPENAI_API_KEY": canary})
        assert served.keys[0] == f"Bearer {canary}"
    assert done.status == 0, done.said
    assert canary not in done.said
    found = [path for path in (tmp_path / "runs").rglob("*") if path.is_file() and canary.encode() in path.read_bytes()]
    assert found == []
    assert {row["failure_kind"] for row in attempts_of(tmp_path / "runs/r")} == {"exception"}


def test_a_prompt_that_an_endpoint_does_not_take_is_shortened(forks: Forks, tmp_path: Path):
    pytest.importorskip("aiohttp")

    def answer(body: dict) -> Reply:
        if not body:
            return Reply({"data": [{"id": "m", "max_model_len": 3000}]})
        if len(body["messages"][0]["content"]) > 4 * 3000:
            return error(400, "This model's maximum context length is 3000 tokens.")
        return chat(fenced(f"{ROOTS}\n# {'much of it ' * 1500}"))

    with serving(answer, lists=True) as served:
        done = asked(forks, tmp_path, served, "--sampling-max-tokens 500 --rounds 4 --run r")
    assert done.status == 0, done.said
    assert done.err.count("note: prompts show only the first") == 1
    rows = attempts_of(tmp_path / "runs/r")
    assert len(rows) == 4
    assert "characters more\n```" in rows[1]["prompt"]
    assert served.paths.count("/v1/models") == 1


@pytest.mark.slow
def test_prompts_of_a_search_of_an_earlier_version_are_not_shortened_by_an_estimate(forks: Forks, tmp_path: Path):
    pytest.importorskip("aiohttp")
    models, long = Reply({"data": [{"id": "m", "max_model_len": 3000}]}), fenced(f"{ROOTS}\n# {'much of it ' * 1500}")
    with serving(lambda body: chat(long) if body else models) as served:
        assert asked(forks, tmp_path, served, "--sampling-max-tokens 500 --rounds 1 --run r").status == 0
        as_an_earlier_version_began(tmp_path / "runs/r")
        done = discover(forks, tmp_path, "--resume r --rounds 2")
    assert done.status == 0, done.said
    assert "note: prompts show" not in done.err
    assert "much of it\n```" in attempts_of(tmp_path / "runs/r")[1]["prompt"]


@pytest.mark.slow
def test_a_prompt_that_the_models_context_does_not_hold_is_shortened(forks: Forks, tmp_path: Path):
    folder = make_task(tmp_path / "mine", "def verify(points):\n    return sum(points)\n")
    (folder / "program.py").write_text(f"points = [1]\n# {'long ' * 3000}\n")
    done = discover(forks, tmp_path, "mine --rounds 1 --num-samples 2 --sampling-max-tokens 5 --run r")
    assert done.status == 0, done.said
    rows = attempts_of(tmp_path / "runs/r")
    assert all("points = [1]" in row["prompt"] and "characters more\n```" in row["prompt"] for row in rows)
    assert done.err.count("note: prompts show only the first") == 1


# Kills


@pytest.mark.parametrize(
    "fault",
    # one that is interrupted and one whose responses had arrived are below and above, by default
    [slow("manifest.torn:7"), slow("sampled:3"), "renamed:12"],
)
def test_a_killed_search_ends_with_the_same_rows_and_files(forks: Forks, tmp_path: Path, whole: Path, fault: str):
    assert replayed(forks, tmp_path, run="whole", words="--concurrency 4", fault=fault).status == -signal.SIGKILL
    done = discover(forks, tmp_path, "--resume whole")
    assert done.status == 0, done.said
    run = tmp_path / "runs/whole"
    assert attempts_of(run) == attempts_of(whole)
    assert files_of(run) == files_of(whole)
    assert check_run(run).problems == []
    assert not list(run.rglob(".*.tmp"))


@pytest.mark.slow
def test_another_ctrl_c_ends_it_though_a_verifier_never_does(tmp_path: Path):
    hangs = "import pathlib, time\n{FIRST}    pathlib.Path('hangs').touch()\n    time.sleep(3600)\n"
    make_task(tmp_path / "mine", hangs.replace("{FIRST}", FIRST))
    write_responses(tmp_path / "r.jsonl", [fenced(REST)])
    words = "mine --proposer replay --replay-from r.jsonl --run r".split()
    command = [sys.executable, "-m", "rlvr_cli", "discover", *words]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert wait_for((tmp_path / "hangs").exists)
            for said in ("Another Ctrl-C stops at once", "rlvr discover --resume"):
                process.send_signal(signal.SIGINT)
                assert process.stderr is not None
                assert any(said in line for line in process.stderr), said
            assert process.wait(20) == 130
        finally:
            process.kill()
    assert [part.rows for part in read_run(tmp_path / "runs/r").entries if part.folder == "segments"] == [1]


def wait_for(condition: Callable[[], bool]) -> bool:
    for _ in range(600):
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_a_search_can_be_made_longer_not_shorter_and_ctrl_c_keeps_what_is_done(
    forks: Forks, tmp_path: Path, whole: Path
):
    assert replayed(forks, tmp_path, run="whole", words="--max-attempts 3").status == 0
    assert len(attempts_of(tmp_path / "runs/whole")) == 3
    done = discover(forks, tmp_path, "--resume whole --max-attempts 8", fault="sampled:3:int")
    assert done.status == 130
    assert "rlvr discover --resume" in done.err
    done = discover(forks, tmp_path, "--resume whole --max-attempts 8")
    assert done.status == 0, done.said
    before = files_of(tmp_path / "runs/whole"), (tmp_path / "runs/whole/run.json").read_bytes()
    done = discover(forks, tmp_path, "--resume whole --rounds 3")
    assert (done.status, done.out) == (1, "")
    assert "whole has made 4 rounds already, and is to end after 3.\n  --rounds must be at least 4." in done.err
    assert (files_of(tmp_path / "runs/whole"), (tmp_path / "runs/whole/run.json").read_bytes()) == before
    assert attempts_of(tmp_path / "runs/whole") == attempts_of(whole)
    assert check_run(tmp_path / "runs/whole").problems == []


@pytest.mark.parametrize("kills", KILLS)
def test_a_search_killed_at_random_points_ends_the_same(forks: Forks, tmp_path: Path, whole: Path, kills: int):
    generator, killed, number = random.Random(0), 0, 0
    points = (
        "create",
        "write",
        "write.torn",
        "rename",
        "renamed",
        "manifest",
        "manifest.torn",
        "manifest.done",
        "sampled",
    )
    while killed < kills:
        folder = tmp_path / str(number)
        folder.mkdir()
        run, status = folder / "runs/whole", -signal.SIGKILL
        while status:
            fault = f"{generator.choice(points)}:{generator.randint(1, 12)}" if killed < kills else ""
            call = (
                discover(forks, folder, "--resume whole", fault=fault)
                if run.exists()
                else replayed(forks, folder, run="whole", fault=fault)
            )
            status = call.status
            assert status in (0, -signal.SIGKILL), call.said
            killed += status != 0
        assert attempts_of(run) == attempts_of(whole)
        assert files_of(run) == files_of(whole)
        assert check_run(run).problems == []
        number += 1


# Proposers and tasks


@pytest.mark.slow
def test_a_model_that_cannot_program_says_so_in_its_rows(forks: Forks, tmp_path: Path):
    done = discover(forks, tmp_path, "kissing --rounds 2 --num-samples 1 --sampling-max-tokens 5 --run tiny")
    assert done.status == 0, done.said
    rows = attempts_of(tmp_path / "runs/tiny")
    assert [row["failure_kind"] for row in rows] == ["no_code"] * 2
    assert all(row["response_ids"] for row in rows)
    assert "attempt_errors" in done.err
    assert (tmp_path / "runs/tiny/best/program.py").exists(), "the program to start from"
    report = (tmp_path / "runs/tiny/report.md").read_text()
    assert "Final score: 22 (the program to start from)." in report
    assert not re.search(r"best score|Prompts before", report), "it names nothing that is not there"
    assert forks.run("analyze", "report", tmp_path / "runs/tiny", cwd=tmp_path).status == 0
    page = (tmp_path / "runs/tiny/report.html").read_text()
    assert "Best program of tiny: a score of 22, the program to start from" in page
    assert "no_code" in page


@pytest.mark.slow
def test_mutations_climb_in_a_small_dimension(forks: Forks, tmp_path: Path):
    """In 5 dimensions the search finds the 40 roots, which are the best that is known."""
    words = "kissing --dim 5 --proposer mutate --rounds 2 --num-samples 3 --seed {} --run {}"
    assert discover(forks, tmp_path, words.format(0, "a")).status == 0
    rows = attempts_of(tmp_path / "runs/a")
    assert max(row["reward"] for row in rows) == 40
    assert len({row["candidate"]["program"] for row in rows}) > 1
    assert {row["candidate"]["proposer"] for row in rows} == {"mutate"}
    assert discover(forks, tmp_path, f"{words.format(1, 'b')} --max-attempts 1").status == 0
    (other,) = attempts_of(tmp_path / "runs/b")
    assert other["candidate"]["program"] != rows[0]["candidate"]["program"]


@pytest.mark.slow
def test_a_program_that_runs_out_of_time_is_run_again_when_it_comes_again(forks: Forks, tmp_path: Path):
    """It may have been the machine: only a verdict on what a program gave is taken over."""
    words = "--program-timeout 2 --strategy best-of-n"
    responses = [fenced(program) for program in ("import time; time.sleep(60)", WRONG) * 2]
    assert replayed(forks, tmp_path, run="r", words=words, responses=responses).status == 0
    rows = attempts_of(tmp_path / "runs/r")
    assert [row["failure_kind"] for row in rows][::2] == ["timeout", "timeout"]
    assert [row["candidate"]["same_as"] for row in rows] == [None, None, None, 1]


def test_each_strategy_shows_what_it_says(forks: Forks, tmp_path: Path):
    def parents(words: str) -> list[list[int]]:
        name = f"r{len(list(tmp_path.glob('runs/*')))}"
        assert replayed(forks, tmp_path, run=name, words=words, responses=RESPONSES[2:7]).status == 0
        return [row["candidate"]["parents"] for row in attempts_of(tmp_path / f"runs/{name}")]

    assert parents("--strategy best-of-n") == [[], [], [], [], []]
    assert parents("--strategy islands --islands 2 --parents 2") == [[], [], [0], [], [0, 2]]


def test_a_program_of_ones_own_is_where_the_search_starts(forks: Forks, tmp_path: Path):
    (tmp_path / "mine.py").write_text(f"# mine\n{ROOTS}")
    assert replayed(forks, tmp_path, run="r", words="--start mine.py --rounds 1").status == 0
    rows = attempts_of(tmp_path / "runs/r")
    assert len(rows) == 2, "--rounds ends it"
    assert "with a score of 220:\n\n```python\n# mine\n" in rows[0]["prompt"]
    assert json.loads((tmp_path / "runs/r/conversation_log.json").read_text())["start"]["score"] == 220


def test_the_program_to_start_from_is_the_best_until_an_attempt_is(forks: Forks, tmp_path: Path):
    (tmp_path / "mine.py").write_text(f"# mine\n{ROOTS}")
    done = replayed(forks, tmp_path, run="r", words="--start mine.py --max-attempts 4")
    assert "best 220 (the program to start from)" in done.err
    rows = attempts_of(tmp_path / "runs/r")
    assert [row["candidate"]["parents"] for row in rows] == [[], [], [0], [1]]
    assert all("a score of 220:\n\n```python\n# mine\n" in row["prompt"] for row in rows), "also beside a failure"
    assert (tmp_path / "runs/r/best/program.py").read_text() == f"# mine\n{ROOTS}"
    assert len(json.loads((tmp_path / "runs/r/best/points.json").read_text())) == 220
    done = discover(forks, tmp_path, "--resume r --max-attempts 8")
    assert done.status == 0, done.said
    assert len(json.loads((tmp_path / "runs/r/best/points.json").read_text())) == 582


@pytest.mark.slow  # where no attempt is made at all, by default
def test_all_outputs_name_the_program_to_start_from_where_it_is_the_best(forks: Forks, tmp_path: Path):
    (tmp_path / "mine.py").write_text(f"# mine\n{CODE}")
    responses = [fenced(AXES), fenced(ROOTS)]
    done = replayed(forks, tmp_path, run="r", words="--start mine.py --format json", responses=responses)
    assert done.status == 0, done.said
    [row] = json.loads(done.out)
    assert (row["valid"], row["start_score"], row["best_score"], row["best_attempt"]) == (2, 582, 582, None)
    assert "nothing is better than the program to start from" in done.err
    assert best_scores(tmp_path / "runs/r") == (582, 582)
    page = write_report([tmp_path / "runs/r"]).read_text()
    assert "Best program of r: a score of 582, the program to start from</h3>\n<pre># mine\n" in page
    report = (tmp_path / "runs/r/report.md").read_text()
    assert not re.search(r"best score|Prompts before", report), "no gain is a gain over it"


def best_scores(run: Path) -> tuple[float, float]:
    """The best score of a search as its summary and the list of runs have it."""
    [table] = [table for table in search_tables(read_run(run)) if table.title == "searches"]
    [summarized], [listed] = table.records(), list_runs([run])
    return summarized["best_score"], listed["best_score"]


def test_a_start_with_the_target_is_all_that_is_asked_for(forks: Forks, tmp_path: Path):
    (tmp_path / "mine.py").write_text(f"# mine\n{ROOTS}")
    done = replayed(forks, tmp_path, run="r", words="--start mine.py --target 220")
    assert done.status == 0, done.said
    assert "has the score --target" in done.err
    assert attempts_of(tmp_path / "runs/r") == []
    assert best_scores(tmp_path / "runs/r") == (220, 220)
    assert "a score of 220, the program to start from" in write_report([tmp_path / "runs/r"]).read_text()
    assert (tmp_path / "runs/r/best/program.py").read_text() == f"# mine\n{ROOTS}"
    assert "Final score: 220 (the program to start from). The program is" in (tmp_path / "runs/r/report.md").read_text()


def as_an_earlier_version_began(path: Path) -> None:
    with RunDir.resume(path) as run:
        run.update(start={name: run.metadata["start"][name] for name in ("score", "error", "num_points")})


@pytest.mark.slow
def test_a_search_of_an_earlier_version_goes_on_as_it_began(forks: Forks, tmp_path: Path):
    """Its start does not compete, and it has no more islands than slots; of a new one each attempt has its own."""
    (tmp_path / "mine.py").write_text(f"# mine\n{ROOTS}")
    words = "--strategy islands --start mine.py --max-attempts {}"
    responses = [fenced(AXES)] * 4
    assert replayed(forks, tmp_path, run="r", words=words.format(2), responses=responses).status == 0
    as_an_earlier_version_began(tmp_path / "runs/r")
    done = discover(forks, tmp_path, "--resume r --max-attempts 4")
    assert done.status == 0, done.said
    rows = attempts_of(tmp_path / "runs/r")
    assert [row["candidate"]["island"] for row in rows] == [0, 1, 0, 1]
    assert [row["candidate"]["parents"] for row in rows] == [[], [], [0], [1]]
    assert (tmp_path / "runs/r/best/program.py").read_text() == AXES
    assert "Final score: 22 (attempt 0)" in (tmp_path / "runs/r/report.md").read_text()
    assert replayed(forks, tmp_path, run="new", words=words.format(4), responses=responses).status == 0
    assert [row["candidate"]["island"] for row in attempts_of(tmp_path / "runs/new")] == [0, 1, 2, 3]


def test_a_program_has_the_memory_that_it_is_given(forks: Forks, tmp_path: Path):
    programs = [fenced(f"x = bytearray({size})\n{AXES}") for size in (600_000_000, 100_000_000)]
    assert replayed(forks, tmp_path, run="r", words="--program-memory-gb 0.4", responses=programs).status == 0
    assert [row["failure_kind"] for row in attempts_of(tmp_path / "runs/r")] == ["memory", None]


def test_no_round_begins_once_the_tokens_are_spent_and_each_request_is_as_asked(forks: Forks, tmp_path: Path):
    pytest.importorskip("aiohttp")
    with serving(climber) as served:
        words = "--max-tokens 11 --run r --sampling-temperature 0.5 --sampling-max-tokens 99 --stop END"
        assert asked(forks, tmp_path, served, words).status == 0
    assert len(attempts_of(tmp_path / "runs/r")) == 2, "10 tokens, and 10 more"
    body = served.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"], body["stop"]) == ("m", 0.5, 99, ["END"])
    assert served.paths[0].endswith("/chat/completions")


@pytest.mark.slow
def test_an_endpoint_that_counts_no_tokens_is_not_asked_on_with_a_limit_on_them(forks: Forks, tmp_path: Path):
    pytest.importorskip("aiohttp")

    def uncounted(body: dict) -> Reply:
        choice = {"index": 0, "message": {"role": "assistant", "content": fenced(AXES)}, "finish_reason": "stop"}
        return Reply({"choices": [choice]})

    with serving(uncounted) as served:
        done = asked(forks, tmp_path, served, "--max-tokens 11 --rounds 3 --run r")
        assert (done.status, "Traceback" in done.said) == (1, False)
        assert "does not count tokens" in done.err
        assert len(served.bodies) == 1
        assert discover(forks, tmp_path, "--resume r").status == 1
        assert len(served.bodies) == 1, "nothing more is paid for"
        assert len(attempts_of(tmp_path / "runs/r")) == 1
        done = discover(forks, tmp_path, "--resume r --max-tokens 0 --max-attempts 2")
        assert done.status == 0, done.said
    assert len(attempts_of(tmp_path / "runs/r")) == 2


def make_task(folder: Path, verify: str) -> Path:
    folder.mkdir()
    (folder / "prompt.md").write_text("Write a program whose `points` is a list of different small numbers.\n")
    (folder / "program.py").write_text("points = [1]\n")
    (folder / "verify.py").write_text(verify)
    return folder


def test_a_task_of_ones_own(forks: Forks, tmp_path: Path):
    make_task(
        tmp_path / "mine",
        "def verify(points):\n"
        "    if len(set(points)) < len(points):\n"
        "        return {'reward': 0, 'error': 'two are equal', 'failure_kind': 'equal'}\n"
        "    return {'reward': sum(points) / 4, 'num_points': len(points)}\n",
    )
    responses = [fenced(f"points = {points}") for points in ([2, 2], [1, 2], [9])]
    write_responses(tmp_path / "r.jsonl", responses)
    words = "mine --proposer replay --replay-from r.jsonl --num-samples 1 --run r"
    done = discover(forks, tmp_path, words)
    assert done.status == 0, done.said
    rows = attempts_of(tmp_path / "runs/r")
    assert [row["reward"] for row in rows] == [0, 0.75, 2.25]
    assert [row["failure_kind"] for row in rows] == ["equal", None, None]
    assert [row["candidate"]["num_points"] for row in rows] == [None, 2, 1]
    assert "two are equal" in rows[1]["prompt"]
    assert {row["example_id"] for row in rows} == {"mine"}
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("points = [3, 4]")
    bad.write_text("points = [3, 3]")
    done = discover(forks, tmp_path, f"mine --verify {good}")
    assert (done.status, json.loads(done.out)["reward"]) == (0, 1.75)
    done = discover(forks, tmp_path, f"mine --verify {bad}")
    assert (done.status, json.loads(done.out)["error"]) == (1, "two are equal")


def test_a_verifier_that_fails_is_found_before_anything_is_asked(forks: Forks, tmp_path: Path):
    make_task(tmp_path / "mine", "def verify(points):\n    return points['x']\n")
    write_responses(tmp_path / "r.jsonl", [fenced("points = [1]")])
    done = discover(forks, tmp_path, "mine --proposer replay --replay-from r.jsonl --run r")
    assert done.status == 1
    assert "verify.py:2" in done.err
    assert attempts_of(tmp_path / "runs/r") == []


FIRST, REST = "def verify(points):\n    if points == [1]:\n        return 1\n", "points = [2, 3]"


@pytest.mark.slow
def test_a_verifier_has_the_main_thread_also_when_programs_run_at_once(forks: Forks, tmp_path: Path):
    make_task(
        tmp_path / "mine",
        "import signal, threading\n"
        "def verify(points):\n"
        "    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # only the main thread may\n"
        "    assert threading.current_thread() is threading.main_thread()\n"
        "    return sum(points)\n",
    )
    write_responses(tmp_path / "r.jsonl", [fenced(f"points = [{number}]") for number in range(2, 6)])
    done = discover(forks, tmp_path, "mine --proposer replay --replay-from r.jsonl --concurrency 4 --run r")
    assert done.status == 0, done.said
    assert [row["reward"] for row in attempts_of(tmp_path / "runs/r")] == [2, 3, 4, 5]


def test_a_search_stops_after_a_round_in_which_the_verifier_failed_on_all_that_it_was_asked(
    forks: Forks, tmp_path: Path
):
    make_task(tmp_path / "mine", f"{FIRST}    return points['x']\n")
    programs = ["points = [2]", "points = [3]", "points = [4]", "points = [1]", WRONG]
    write_responses(tmp_path / "r.jsonl", ["no code", *map(fenced, programs)])
    words = "mine --proposer replay --replay-from r.jsonl --num-samples 3 --run r"
    done = discover(forks, tmp_path, words)
    assert done.status == 1
    for said in ("2 of the 3 responses of round 0 could not be graded", "TypeError", "verify.py:4"):
        assert said in done.err, said
    assert "To go on in spite of it: rlvr discover --resume " in done.err
    assert [row["reward"] for row in attempts_of(tmp_path / "runs/r")] == [0, None, None], "what it has is kept"
    assert "the verifier failed: TypeError" in (tmp_path / "runs/r/report.md").read_text()
    done = discover(forks, tmp_path, "--resume r")
    assert done.status == 0, "a round in which it judged something"
    assert [row["reward"] for row in attempts_of(tmp_path / "runs/r")] == [0, None, None, None, 1, 0]


@pytest.mark.slow
def test_one_failure_of_the_verifier_does_not_stop_a_search_but_another_in_a_row_does(forks: Forks, tmp_path: Path):
    """Where a round asks it once: what it said before counts, too, and programs that give nothing do not."""
    make_task(tmp_path / "mine", f"{FIRST}    return points['x']\n")
    programs = ["points = [2]", "points = [1]", "points = [3]", WRONG, "points = [4]", "points = [1]"]
    write_responses(tmp_path / "r.jsonl", list(map(fenced, programs)))
    done = discover(forks, tmp_path, "mine --proposer replay --replay-from r.jsonl --num-samples 1 --run r")
    assert done.status == 1
    assert "2 of the 2 responses of rounds 2 and 4 could not be graded" in done.err
    assert [row["reward"] for row in attempts_of(tmp_path / "runs/r")] == [None, 1, None, 0, None]


def test_a_mutation_is_of_the_whole_program_however_long_and_with_any_fences(forks: Forks, tmp_path: Path):
    folder = make_task(tmp_path / "mine", "def verify(points):\n    return sum(points)\n")
    text = f'N = 1  # one of 1, 2\nFENCES = """\n```\n````\n"""\n# {"x" * 30_000}\npoints = [N]\n'
    (folder / "program.py").write_text(text)
    done = discover(forks, tmp_path, "mine --proposer mutate --num-samples 1 --rounds 2 --run r")
    assert done.status == 0, done.said
    assert [row["reward"] for row in attempts_of(tmp_path / "runs/r")] == [2, 1]


VERDICTS = [  # what a verifier does, the reward, and what is said of it
    ("raise SystemExit(0)", None, "SystemExit"),
    ("raise BaseException('all of it')", None, "all of it"),
    ("print(points); return 2", 2, '"reward": 2.0'),
    ("import os; os.write(1, b'written'); return 2", 2, '"reward": 2.0'),
    ("return float('nan')", None, "not a finite number"),
    ("return '3'", None, "not a number or a dictionary"),
    ("return {'score': 3}", None, "it has score"),
    ("raise Unsayable", None, "Unsayable"),
    ("return {'reward': -2, 'error': 'too few'}", 0, "too few"),
    ("return {'reward': 2, 'message': 'm', 'grade': 'A', 'self': 1}", 2, '"message": "m"'),
    ("return {'reward': 2, 'density': float('inf')}", 2, '"density": "Infinity"'),
    ("points.clear(); return 2", 2, '"reward": 2.0'),
]


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> Path:
    """A task whose verifier does to `points = [2, N]` what VERDICTS has under N."""
    unsayable = "class Unsayable(Exception):\n    def __str__(self): raise SystemExit\n"
    cases = "".join(
        f"    if points == [2, {number}]:\n        {does}\n" for number, (does, _, _) in enumerate(VERDICTS)
    )
    folder = tmp_path_factory.mktemp("judged")
    make_task(folder / "mine", f"print('loaded')\n{unsayable}{FIRST}{cases}")
    return folder


def test_whatever_a_verifier_does_is_a_verdict(forks: Forks, judged: Path):
    write_responses(judged / "r.jsonl", [fenced(f"points = [2, {number}]") for number in range(len(VERDICTS))])
    words = f"mine --proposer replay --replay-from r.jsonl --num-samples {len(VERDICTS)} --run r --format json"
    done = discover(forks, judged, words)
    assert done.status == 0, done.said
    assert len(json.loads(done.out)) == 1, "what a verifier prints stays out of the result"
    for row, (does, reward, _) in zip(attempts_of(judged / "runs/r"), VERDICTS, strict=True):
        assert row["reward"] == reward, does
        assert reward or row["candidate"]["error"], does
    points = [json.loads(path.read_text()) for path in (judged / "runs/r").glob("*/*.json")]
    assert points
    assert all(len(each) == 2 or each == [1] for each in points), "of the program to start from: [1]"


@pytest.mark.parametrize("number", [slow(3), 4, slow(7), 10])
def test_a_verdict_is_printed_as_json(forks: Forks, judged: Path, number: int):
    _, reward, said = VERDICTS[number]
    (judged / "rest.py").write_text(f"points = [2, {number}]")
    done = discover(forks, judged, "mine --verify rest.py")
    assert done.status == (0 if reward else 1)
    assert said in done.out
    json.loads(done.out, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "form", [AXES, "def get_centers():\n    return [[1, 0], [0, 1]]", slow("def run_code():\n    return ([[1]],)")]
)
def test_verify_says_no_with_status_1(forks: Forks, tmp_path: Path, form: str):
    (tmp_path / "program.py").write_text(form)
    done = discover(forks, tmp_path, "--verify program.py --dim 11")
    verdict = json.loads(done.out)
    valid = form == AXES
    assert done.status == (0 if valid else 1)
    assert verdict["validity"] == float(valid)
    assert bool(verdict["error"]) is not valid
    assert not (tmp_path / "runs").exists()


def test_dry_run_begins_nothing(forks: Forks, tmp_path: Path):
    done = discover(forks, tmp_path, "kissing --dim 7 --proposer mutate --max-attempts 60 --target 126 --dry-run")
    assert done.status == 0, done.said
    for said in ("kissing-7", "at most 60 attempts", "until a score of 126", "10 s"):
        assert said in done.err, said
    assert "in 7 dimensions" in done.out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("nowhere", 1, "There is no task 'nowhere'"),
        ("kissing --replay-from x.jsonl", 2, "--replay-from FILE belong together"),
        ("kissing --proposer replay --replay-from x.jsonl", 1, "x.jsonl"),
        ("kissing --proposer mutate --model m", 2, "--model has no effect with --proposer mutate"),
        ("kissing --proposer mutate --max-tokens 9", 2, "--max-tokens has no effect with --proposer mutate"),
        ("kissing --proposer replay --replay-from x.jsonl --max-tokens 9", 2, "--max-tokens has no effect"),
        ("kissing --proposer mutate --islands 2", 2, "--islands has no effect without --strategy islands"),
        ("kissing --proposer mutate --strategy best-of-n --parents 3", 2, "--parents has no effect without"),
        ("kissing --proposer mutate --start start.py", 1, "finds no parameter"),
        ("kissing --start nothing.py", 1, "nothing.py"),
        ("kissing --verify nothing.py", 1, "nothing.py"),
        ("kissing --verify start.py --dry-run", 2, "--dry-run has no effect with --verify"),
        ("kissing --base-url http://127.0.0.1:1/v1", 2, "name of its model"),
        ("kissing --num-samples 0", 2, "--num-samples is 0"),
        ("empty --proposer mutate", 1, "verify.py"),
        ("silent --proposer mutate", 1, "silent/prompt.md is empty"),
    ],
)
def test_bad_input_is_said_in_two_lines(forks: Forks, tmp_path: Path, words: str, status: int, said: str):
    (tmp_path / "start.py").write_text("points = []\n")
    (tmp_path / "empty").mkdir()
    (make_task(tmp_path / "silent", "def verify(points): return 1\n") / "prompt.md").write_text("\n")
    done = discover(forks, tmp_path, words)
    assert (done.status, "Traceback" in done.said) == (status, False), done.said
    assert said in done.err
    assert done.err.count("error:") == 1
    assert not (tmp_path / "runs").exists()


def copied(whole: Path, folder: Path, responses: list[str]) -> Path:
    """A copy of the whole run where it can go on, with these responses."""
    write_responses(folder / "responses.jsonl", responses)
    return shutil.copytree(whole, folder / "runs/whole")


def test_points_that_are_not_those_of_the_best_attempt_are_not_taken_for_them(
    forks: Forks, tmp_path: Path, whole: Path
):
    run = copied(whole, tmp_path, RESPONSES)
    (best,) = [p for p in (run / "points").iterdir() if len(json.loads(p.read_text())) == 582]
    best.write_text("[[1]]")
    done = discover(forks, tmp_path, "--resume whole")
    assert (done.status, "Traceback" in done.said) == (1, False)
    assert f"{best.name} is damaged" in done.err
    assert len(json.loads((run / "best/points.json").read_text())) == 582


def test_the_same_run_is_not_resumed_with_other_inputs(forks: Forks, tmp_path: Path, whole: Path):
    copied(whole, tmp_path, RESPONSES[::-1])
    done = discover(forks, tmp_path, "--resume whole")
    assert done.status == 1
    assert "made from other inputs" in done.err
