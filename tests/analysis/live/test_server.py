"""The server of `rlvr view`: who may ask, what the answers are, and that they are what SQL says."""

import asyncio
import html
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

pytest.importorskip("starlette", reason="starlette is not installed: pip install -e '.[view]'")
pytest.importorskip("httpx2", reason="httpx2 is not installed: pip install -e '.[test]'")

from starlette.testclient import TestClient

from factories import a_conversation, a_rollout
from rlvr_cli.analysis import summary
from rlvr_cli.analysis.live import pages, server
from rlvr_cli.analysis.live import rollouts as live_rollouts
from rlvr_cli.analysis.live.server import Library, is_local, listen, open_app
from rlvr_cli.analysis.queries import run_list
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.analysis.queries.run_list import Known, list_runs
from rlvr_cli.analysis.report.build import write_report
from rlvr_cli.analysis.statistics import alarms, comparison
from rlvr_cli.commands.store.view import named_runs
from rlvr_cli.config.store.view import ViewConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir

TOKEN = "the-token-of-this-test"
PATHS = ("/", "/view?run=a", "/facets?run=a", "/rollouts?run=a", "/group?run=a", "/places?run=a", "/nothing")

ENDLESS = "(SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range + b.range = length($words)) > 0"


def rollout(run_id, example, sample, *, phase="train", step=0, reward=0.0, response="r", **changes):
    right = reward is not None and reward > 0.5
    values = {
        "run_id": run_id, "phase": phase, "step": step, "policy_version": step, "example_id": example, "sample_index": sample,
        "prompt": f"Think.\nUser: What is {example}?", "response": response, "response_ids": tuple(response.encode()),
        "sampled_logprobs": tuple(-0.25 for _ in response.encode()), "num_response_tokens": len(response.encode()),
        "answer_reward": reward, "reward": reward, "ground_truth": "7", "extracted_answer": "7" if right else "8",
        "category": f"format_1_answer_{int(right)}", "failure_kind": None if right else "wrong_answer",
    }  # fmt: skip
    return a_rollout(**{**values, **changes})


def metadata(**config):
    return {"facts": {"prompt": {"text": "Think.\nUser: {question}"}}, "config": config, "planned": {"steps": 9}}


def commit(run, step, rows, *, reward=0.5, phase="train"):
    run.commit_rollouts(phase, step, rows)
    run.commit_metrics(step, phase, {"reward/mean": reward, "reward/samples": float(len(rows))})


def some_rollouts(run_id, step, *, phase="train"):
    """Four questions of three samples; of question i, i samples are right, and the last grade has failed."""
    return [
        rollout(run_id, f"q{q}", s, phase=phase, step=step, reward=None if (q, s) == (3, 2) else float(s < q),
                response=f"Step {step} SAYS {q}{s}", advantage=None if s == 2 else s - 0.5)
        for q in range(4) for s in range(3)
    ]  # fmt: skip


def make_run(root, name, *, steps=3, learning_rate=0.1):
    with RunDir.create(root, "grpo", name=name, metadata=metadata(learning_rate=learning_rate)) as run:
        for step in range(steps):
            commit(run, step, some_rollouts(name, step), reward=step / 10)
        commit(run, steps, some_rollouts(name, steps, phase="eval"), phase="eval")
    return root / name


def test_an_episode_is_as_long_as_what_its_policy_wrote(tmp_path):
    said = a_conversation(("policy", "ab"), ("environment", "much more than that"), ("policy", "c"))
    with RunDir.create(tmp_path, "grpo", name="e", metadata=metadata()) as run:
        commit(run, 0, [rollout("e", "q", 0, response="four"), rollout("e", "q", 1, **said)])
    databases = live_rollouts.Databases()
    found = live_rollouts.page(databases, [read_run(tmp_path / "e")], {"sort": "num_response_tokens"})
    databases.close()
    assert [(row["sample_index"], row["num_response_tokens"]) for row in found["rows"]] == [(1, 3), (0, 4)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    make_run(root, "a")
    make_run(root, "b", steps=4, learning_rate=0.2)
    return root


def test_the_newest_rollouts_are_read_from_their_own_parts(tmp_path):
    """A run of 1,500 steps took 4 seconds for each page."""
    infos = [read_run(make_run(tmp_path, name, steps=6)) for name in "ab"]
    databases = live_rollouts.Databases()

    def steps(first, **asked):
        found = live_rollouts.page(databases, infos, {"first": str(first), **asked})
        return [(row["run_id"], row["step"]) for row in found["rows"]], found["found"]

    for step in (0, 4, 5):
        (tmp_path / "a" / "rollouts" / f"train-00000{step}-0000.parquet").unlink()
    assert steps(24, run_id='"a"', phase='"train"') == ([("a", 3)] * 12 + [("a", 2)] * 12 + [("a", 1)], 72)
    assert steps(90) == ([("b", 6)] * 6 + [("b", 5)] * 12 + [("b", 4)] * 7, 168)
    assert steps(168) == ([], 168)
    databases.close()


@pytest.fixture(scope="module")
def client(root):
    with open_app(Library(root), token="") as app:
        yield TestClient(app, base_url="http://127.0.0.1:8000")


@pytest.fixture(scope="module")
def guarded_app(root):
    with open_app(Library(root), token=TOKEN, hosts=["localhost", "Box"], cookie="rlvr-view-8000") as app:
        yield app


@pytest.fixture
def guarded(guarded_app):
    """One that has no cookie yet."""
    return TestClient(guarded_app, base_url="http://127.0.0.1:8000")


# Who may ask


@pytest.mark.parametrize("cookie", ["", f"rlvr-view-8000={TOKEN[:-1]}", f"rlvr-view-9={TOKEN}", "rlvr-view-8000=ü"])
def test_without_the_token_every_request_is_refused(guarded, cookie):
    for path in PATHS:
        answer = guarded.get(path, headers={"cookie": cookie.encode()})
        assert answer.status_code == 403
        assert TOKEN not in answer.text
        assert "q0" not in answer.text


def test_the_token_in_the_address_becomes_a_cookie_and_the_address_is_left(guarded):
    answer = guarded.get(f"/?token={TOKEN}")
    assert answer.status_code == 200
    assert answer.headers["refresh"] == "0; url=./"
    assert answer.text == ""
    name, *attributes = answer.headers["set-cookie"].split("; ")
    assert name == f"rlvr-view-8000={TOKEN}"
    assert set(attributes) == {"HttpOnly", "Path=/", "SameSite=strict"}
    assert guarded.get("/").status_code == 200  # the client keeps the cookie
    assert TOKEN not in guarded.get("/").text


@pytest.mark.parametrize("token", ["", "wrong", TOKEN.upper(), TOKEN + "x"])
def test_another_token_makes_no_cookie(guarded, token):
    answer = guarded.get("/", params={"token": token})
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200), ("localhost:9", 200), ("LOCALHOST", 200), ("box:8000", 200),
        ("[::1]:8000", 200), ("192.168.0.7:8000", 200), ("evil.example:8000", 403), ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403), ("", 403), ("[evil.example]", 403), ("localhost@evil.example", 403),
    ],
)  # fmt: skip
def test_a_name_that_is_not_this_machines_is_refused(guarded, host, status):
    guarded.get(f"/?token={TOKEN}")
    assert guarded.get("/", headers={"host": host}).status_code == status
    assert guarded.get(f"/?token={TOKEN}", headers={"host": host}).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "OPTIONS"])
def test_the_server_only_reads(guarded, method):
    guarded.get(f"/?token={TOKEN}")
    for path in PATHS:
        assert guarded.request(method, path).status_code == 405
    assert guarded.head("/").status_code == 200


@pytest.mark.parametrize("path", ["/", "/rollouts?run=a", "/nothing", f"/?token={TOKEN}", "/?token=wrong"])
def test_every_answer_has_the_policy(guarded, path):
    for _ in range(2):  # without the cookie, and with it
        headers = guarded.get(path).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["connect-src"] == policy["form-action"] == "'self'"
        assert policy["frame-ancestors"] == policy["trusted-types"] == policy["base-uri"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert all(re.fullmatch(r"'sha256-[\w+/]{43}='", policy[f"{kind}-src"]) for kind in ("script", "style"))
        assert headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
        guarded.get(f"/?token={TOKEN}")


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("192.168.1.1", False), ("localhost.example", False), ("box", False)],
)  # fmt: skip
def test_what_is_local(host, local):
    assert is_local(host) == local


def test_a_port_that_is_taken_is_an_error():
    with listen("127.0.0.1", 0) as listener, pytest.raises(RlvrError, match="Cannot listen on"):
        listen("127.0.0.1", listener.getsockname()[1])


# The pages


def test_the_list_has_every_run_and_the_broken_ones_too(tmp_path):
    make_run(tmp_path, "a")
    make_run(tmp_path, "b", steps=1, learning_rate=0.2)
    make_run(tmp_path, "cut", steps=1)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text("{")
    (tmp_path / "no-run").mkdir()
    part = next((tmp_path / "cut" / "rollouts").glob("eval-*"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with open_app(Library(tmp_path), token="") as app:
        text = TestClient(app, base_url="http://127.0.0.1").get("/").text
    rows = dict(re.findall(r'<tr data-run="([^"]*)">(.*?)</tr>', text, re.DOTALL))
    assert set(rows) == {"a", "b", "cut", "bad"}
    assert ">finished<" in rows["a"]
    assert "3 of 9 steps" in rows["a"]
    assert "41.7% [" in rows["a"]  # 5 of 12, the failed grade counts as wrong
    assert "eval 3" in rows["a"]
    assert "learning_rate 0.2" in rows["b"]
    assert ">broken<" in rows["bad"]
    assert "is not valid JSON" in rows["bad"]
    assert ">broken<" in rows["cut"]
    assert "its sha256 is not" in rows["cut"]


def test_the_list_says_its_order_and_has_others(tmp_path):
    paths = []
    for name, steps in (("m", 2), ("a", 5), ("z", 3)):
        paths.append(make_run(tmp_path, name, steps=steps))
    with RunDir.create(tmp_path, "grpo", name="empty", metadata={}):
        pass
    for age, path in enumerate(paths):  # as a copy leaves them
        os.utime(path / "run.json", (3e9 - age, 3e9 - age))

    def listed(library, address):
        with open_app(library, token="") as app:
            text = TestClient(app, base_url="http://127.0.0.1").get(address).text
        (current,) = re.findall(r'aria-current="true">([^<]*)<', text)
        return re.findall(r'<tr data-run="([^"]*)">', text), current

    assert listed(Library(tmp_path), "/") == (["empty", "z", "a", "m"], "last written first")
    assert listed(Library(tmp_path), "/?order=name") == (["a", "empty", "m", "z"], "by name")
    assert listed(Library(tmp_path), "/?order=newest") == (["empty", "z", "a", "m"], "newest first")
    assert listed(Library(tmp_path), "/?order=best")[0][-1] == "empty", "without an accuracy"
    assert listed(Library(None, paths), "/") == (["m", "a", "z"], "as named")


def test_a_page_that_shows_the_same_is_not_sent_again(tmp_path):
    with (
        RunDir.create(tmp_path, "grpo", name="a", metadata=metadata()) as run,
        open_app(Library(tmp_path), token="") as app,
    ):
        client = TestClient(app, base_url="http://127.0.0.1")
        commit(run, 0, some_rollouts("a", 0), reward=0.25)
        for path in ("/", "/view?run=a"):
            first = client.get(path)
            same = client.get(path, headers={"if-none-match": first.headers["etag"]})
            assert (same.status_code, same.content) == (304, b"")
            assert same.headers["etag"] == first.headers["etag"]
        assert ">running<" in first.text
        assert "at 1: 0.75" not in first.text
        commit(run, 1, some_rollouts("a", 1), reward=0.75)
        grown = client.get("/view?run=a", headers={"if-none-match": first.headers["etag"]})
        assert grown.status_code == 200
        assert "at 1: 0.75" in grown.text  # a point of the curve
        with run.activity.doing("sampling", total=64, unit="responses"):
            doing = client.get("/view?run=a", headers={"if-none-match": grown.headers["etag"]})
            assert "sampling, 0 of 64 responses" in doing.text
        committed = [re.findall('data-committed="([^"]+)"', page.text) for page in (first, grown, doing)]
        assert committed[0] != committed[1] == committed[2] != [], "rollouts are asked for again where it changes"
    # it has ended


def test_the_list_reads_the_runs_that_have_changed(tmp_path, monkeypatch):
    read = []

    def counted(path):
        read.append(path.name)
        return read_run(path)

    monkeypatch.setattr(run_list, "read_run", counted)
    make_run(tmp_path, "a", steps=1)
    with (
        RunDir.create(tmp_path, "grpo", name="b", metadata=metadata(learning_rate=0.2)) as run,
        open_app(Library(tmp_path), token="") as app,
    ):
        client = TestClient(app, base_url="http://127.0.0.1")
        assert "0 of 9 steps" in client.get("/?order=name").text
        assert sorted(read) == ["a", "b"]
        commit(run, 0, some_rollouts("b", 0))
        text = client.get("/?order=name").text
        assert text.count("1 of 9 steps") == 2
        assert "learning_rate 0.1" in text
        assert read[2:] == ["b"]
        shutil.rmtree(tmp_path / "a")
        assert "learning_rate" not in client.get("/?order=name").text, "of one run nothing differs"
        make_run(tmp_path, "a", steps=2)
        assert "2 of 9 steps" in client.get("/?order=name").text
    assert read[3:] == ["a"]
    paths, known = [tmp_path / "a", tmp_path / "b"], Known()
    assert list_runs(paths, known=known) == list_runs(paths)
    part = next((tmp_path / "b" / "rollouts").glob("train-*"))
    part.rename(tmp_path / "part")
    assert known.read(paths)[tmp_path / "b"].row["problem"] is None
    known.read(paths[:1])
    assert "Cannot read" in str(known.read(paths)[tmp_path / "b"].row["problem"]), "only runs of the last list are kept"
    (tmp_path / "part").rename(part)
    assert known.read(paths)[tmp_path / "b"].row["problem"] is None, "a broken run is looked at each time"


def test_a_run_that_ends_changes_the_page(tmp_path):
    root = tmp_path / "[1]?*"
    with open_app(Library(root), token="") as app:
        client = TestClient(app, base_url="http://127.0.0.1")
        empty = client.get("/")
        assert "There are no runs yet." in empty.text
        made = make_run(root / "sweep", "x", steps=1)
        below = client.get("/", headers={"if-none-match": empty.headers["etag"]}).text
        (command,) = re.findall("<code>(.*)</code>", below)
        named = ViewConfig(runs=tuple(shlex.split(html.unescape(command))[2:]))
        assert named_runs(named) == (None, [made]), "what the pattern names is looked for with it"
        assert "no runs yet" not in below
        with RunDir.create(root, "grpo", name="a", metadata=metadata()):
            running = client.get("/")
            assert ">running<" in running.text
        ended = client.get("/", headers={"if-none-match": running.headers["etag"]})
        assert ">finished<" in ended.text


def test_two_runs_are_compared_in_the_words_of_compare(client):
    text = client.get("/view?run=a&run=b").text
    assert "The data cannot tell which is better: B - A is +0.0 points of accuracy" in text
    assert "The questions that both answered" in text
    assert "What differs between the runs" in text
    assert "cannot be compared" not in client.get("/view?run=a").text


def test_the_curves_are_the_reports(client, root, tmp_path):
    report = write_report([root / "a", root / "b"], tmp_path / "report.html").read_text()
    live = client.get("/view?run=a&run=b").text
    curves = [re.search('<section id="curves".*?</section>', text, re.DOTALL)[0] for text in (live, report)]
    assert curves[0] == curves[1]
    assert re.findall("</svg>(.*?)</li>", curves[0]) == ["learning_rate 0.1", "learning_rate 0.2"]
    # the held-out reward with its interval
    assert re.search(r"learning_rate 0\.1 at 3: 0\.5 \[0\.\d+, 0\.\d+\]", curves[0])


def test_a_page_says_which_of_the_chosen_runs_do_not_fit(client, monkeypatch):
    assert "Left out" not in client.get("/view?run=a&run=b").text
    monkeypatch.setattr(server, "MAX_RUNS", 1)
    text = client.get("/view?run=a&run=b").text
    assert "2 runs were chosen, but a page shows 1 at most. Left out: b." in text
    assert text.count("<tr data-run=") == 1


def test_runs_that_share_no_question_say_so(tmp_path):
    for name in ("a", "b"):
        with RunDir.create(tmp_path, "eval", name=name, metadata=metadata()) as run:
            commit(run, 0, [rollout(name, f"of-{name}", 0, phase="eval")], phase="eval")
    with open_app(Library(tmp_path), token="") as app:
        text = TestClient(app, base_url="http://127.0.0.1").get("/view?run=a&run=b").text
    assert "They cannot be compared. The runs share no question." in text


def test_what_limits_a_comparison_is_told_as_compare_tells_it(tmp_path):
    for name, failed in (("a", {}), ("b", {"reward": None, "grade_error": "timeout"})):
        with RunDir.create(tmp_path, "eval", name=name, metadata=metadata()) as run:
            run.commit_rollouts("eval", 0, [a_rollout(run_id=name, **failed)])
    told = pages.verdict_of(read_run(tmp_path / "a"), read_run(tmp_path / "b"))
    assert told.sentences[1] == "Failed grades of B, which count as wrong: 1."
    assert told.sentences[2].startswith("One run an arm")


def test_runs_without_an_accuracy_are_not_compared(tmp_path):
    for command, name in (("pairwise", "a"), ("pairwise", "b"), ("discover", "s"), ("eval", "e")):
        with RunDir.create(tmp_path, command, name=name, metadata=metadata()) as run:
            if command != "discover":  # whose rows are candidates
                commit(run, 0, [rollout(name, "q", 0, phase="eval")], phase="eval")
    infos = {name: read_run(tmp_path / name) for name in "abse"}
    told = {runs: pages.verdict_of(infos[runs[0]], infos[runs[1]]) for runs in ("ab", "sa", "ea")}
    assert [(verdict.sentences, verdict.arms) for verdict in told.values()] == [((), None)] * 3
    assert {runs: verdict.problem for runs, verdict in told.items()} == {
        "ab": "a is a comparison with wins and ties, and has no accuracy.",
        "sa": "s is a search with scores, and has no accuracy.",
        "ea": "compare is of right and wrong answers, which searches and comparisons do not have: a.",
    }


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("", 404, "No run was chosen."), ("run=none", 404, "There is no run none here."),
        ("run=../a", 404, "There is no run ../a here."), ("run=a&run=<b>", 404, "There is no run &lt;b&gt; here."),
    ],
)  # fmt: skip
def test_a_page_of_no_run_says_so(client, query, status, words):
    answer = client.get(f"/view?{query}")
    assert answer.status_code == status
    assert words in answer.text


def test_a_broken_run_has_a_page_that_says_what_is_broken(tmp_path):
    make_run(tmp_path, "a")
    next((tmp_path / "a" / "rollouts").iterdir()).unlink()
    with open_app(Library(tmp_path), token="") as app:
        client = TestClient(app, base_url="http://127.0.0.1")
        assert client.get("/view?run=a").status_code == 409
        assert ">broken<" in client.get("/").text
        answer = client.get("/rollouts?run=a")
    assert answer.status_code == 503, "the page asks again"
    assert "No such file" in answer.json()["error"]


def test_a_part_that_is_damaged_between_two_requests_is_named(tmp_path):
    part = next((make_run(tmp_path, "a") / "rollouts").glob("train-*2-*"))
    with open_app(Library(tmp_path), token="") as app:
        client = TestClient(app, base_url="http://127.0.0.1")
        path = "/places?run=a&example_id=%22q1%22"
        assert client.get(path).status_code == 200
        data = bytearray(part.read_bytes())
        data[4] ^= 0xFF  # the first page's header
        part.write_bytes(data)
        answer = client.get(path)
    assert answer.status_code == 503, "the page asks again"
    assert f"{part} is damaged: its sha256 is not the one that was recorded." in answer.json()["error"]


def test_only_runs_of_the_directory_can_be_named(root, tmp_path):
    make_run(tmp_path, "secret")
    with open_app(Library(None, [root / "a"]), token="") as app:
        client = TestClient(app, base_url="http://127.0.0.1")
        assert client.get("/view?run=a").status_code == 200
        for name in ("b", "secret", str(tmp_path / "secret"), "../secret", "."):
            for path in ("/view", "/rollouts"):
                assert client.get(path, params={"run": name}).status_code == 404
        assert "secret" not in client.get("/").text


def test_runs_of_one_name_are_told_apart(root, tmp_path):
    other, here = make_run(tmp_path / "new", "a", steps=1), f"{root.name}/a"
    with open_app(Library(None, [root / "a", other]), token="") as app:
        client, both = TestClient(app, base_url="http://127.0.0.1"), {"run": [here, "new/a"]}
        assert set(re.findall('data-run="([^"]*)"', client.get("/").text)) == {here, "new/a"}
        assert client.get("/view", params=both).status_code == 200
        assert client.get("/facets", params=both).json()["run_id"] == sorted(["new/a", here])
        found = client.get("/rollouts", params={**both, "run_id": '"new/a"'}).json()["rows"]
        assert {row["run_id"] for row in found} == {"new/a"}
        assert client.get("/rollouts", params={"run": "new/a"}).json()["rows"] == found, "alone it has the same name"


def test_the_copy_of_a_run_is_called_as_its_directory_is(root, tmp_path):
    shutil.copytree(root / "a", tmp_path / "copy")
    with open_app(Library(tmp_path), token="") as app:
        client = TestClient(app, base_url="http://127.0.0.1")
        page = client.get("/view?run=copy").text
        assert re.search("<title>(.*?)</title>.*?<h1>(.*?)</h1>", page, re.DOTALL).groups() == ("rlvr: copy", "copy")
        assert client.get("/facets?run=copy").json()["run_id"] == ["copy"]
        (row, *_) = client.get("/rollouts", params={"run": "copy", "run_id": '"copy"'}).json()["rows"]
        key = {name: json.dumps(row[name]) for name in ("run_id", "phase", "step", "example_id", "sample_index")}
        assert client.get("/group", params={"run": "copy", **key}).json()["samples"] == 3


# The rollouts


FILTERS = {
    "run_id": ["b"],
    "phase": ["train"],
    "step": [3],
    "category": ["format_1_answer_1"],
    "failure_kind": [None, "wrong_answer"],
    "reward": ["above 0.5", "0.5 or less", "none: the grade failed"],
    "words": ["SAYS 1", "what is q2"],
}
SQL = {
    "above 0.5": "reward > 0.5",
    "0.5 or less": "reward <= 0.5",
    "none: the grade failed": "reward IS NULL",
}


def sql_of(filters):
    def one(name, value):
        if name == "reward":
            return SQL[value]
        if name == "words":
            return f"lower(response || prompt) LIKE '%{value.lower()}%'"
        return f"{name} IS NULL" if value is None else f"{name} = {value!r}"

    return " AND ".join(one(name, value) for name, value in filters.items()) or "true"


@pytest.mark.parametrize(
    "names",
    [*((n,) for n in ("reward", "words")), ("run_id", "failure_kind"), ("phase", "step", "category")],
    ids="+".join,
)
def test_filters_are_sql(client, root, names):
    with open_runs([read_run(root / "a"), read_run(root / "b")]) as database:
        for values in itertools.product(*(FILTERS[name] for name in names)):
            filters = dict(zip(names, values, strict=True))
            asked = {k: v if k in ("reward", "words") else json.dumps(v) for k, v in filters.items()}
            answer = client.get("/rollouts", params=[("run", "a"), ("run", "b"), *asked.items()]).json()
            rows = database.select(
                "SELECT run_id, phase, step, example_id, sample_index FROM rollouts"
                f" WHERE {sql_of(filters)} ORDER BY step DESC, phase, example_id, sample_index"
            ).rows
            wanted = sorted(rows, key=lambda row: row[0])  # no run is being written: as they were named
            found = [
                tuple(row[n] for n in ("run_id", "phase", "step", "example_id", "sample_index"))
                for row in answer["rows"]
            ]
            assert answer["found"] == len(wanted), filters
            assert answer["total"] == 48 + 60
            assert found == wanted[:25], filters


@pytest.mark.parametrize(
    ("sort", "down", "words"),
    [
        ("", "1", "says"), ("advantage", "1", "says"), ("outcome", "1", ""), ("", "", ""),
    ],
)  # fmt: skip
def test_pages_follow_each_other_in_every_order(client, sort, down, words):
    """From whichever end a page is read, the pages together are all rollouts, in one order, with NULLs last."""
    asked = {"run": "b", "sort": sort, "down": down, "words": words}
    pages = [client.get("/rollouts", params={**asked, "first": first}).json() for first in range(0, 60, 25)]
    rows = [row for page in pages for row in page["rows"]]
    assert [page["found"] for page in pages] == [60] * 3
    assert [len(page["rows"]) for page in pages] == [25, 25, 10]
    keys = [(row["phase"], row["step"], row["example_id"], row["sample_index"]) for row in rows]
    assert len(set(keys)) == 60
    if sort:
        values = [row["failure_kind"] or row["category"] if sort == "outcome" else row[sort] for row in rows]
        known = [value for value in values if value is not None]
        assert values == known + [None] * (60 - len(known))
        assert known == sorted(known, reverse=down == "1")
    else:
        assert [step for _, step, *_ in keys] == sorted((k[1] for k in keys), reverse=True)
    assert client.get("/rollouts", params={**asked, "first": 60}).json()["rows"] == []


def test_a_query_of_some_steps_leaves_the_others_for_the_next(client):
    assert client.get("/rollouts?run=a&step=1").json()["found"] == 12
    whole = client.get("/rollouts?run=a").json()
    assert (whole["found"], whole["rows"][0]["step"]) == (48, 3)
    assert client.get("/rollouts?run=a&step=1&phase=%22eval%22").json()["found"] == 0
    assert client.get("/rollouts?run=a&phase=null").json() == {"found": 0, "total": 48, "rows": []}


def test_a_row_of_the_list_has_the_question_and_no_text_that_is_not_shown(client):
    row = client.get("/rollouts?run=a").json()["rows"][0]
    assert row["question"] == "What is q0?"
    assert {"response", "prompt", "response_ids"}.isdisjoint(row)


def test_what_can_be_filtered_by(client):
    assert client.get("/facets?run=a&run=b").json() == {
        "run_id": ["a", "b"],
        "phase": ["eval", "train"],
        "step": [0, 1, 2, 3, 4],
        "category": ["format_1_answer_0", "format_1_answer_1"],
        "failure_kind": ["wrong_answer", None],
    }


def test_kinds_are_read_from_new_parts_alone(tmp_path):
    """All parts were read at each commit."""
    infos, other = [], read_run(make_run(tmp_path / "other", "a", steps=1))
    with RunDir.create(tmp_path, "grpo", name="a", metadata=metadata()) as run:
        for step, kind in enumerate(("truncated", "empty")):
            commit(run, step, [rollout("a", "q", 0, step=step, failure_kind=kind)])
            infos.append(read_run(tmp_path / "a"))
    databases = live_rollouts.Databases()

    def kinds(*runs):
        return live_rollouts.facets(databases, runs, {})["failure_kind"]

    assert kinds(infos[0]) == ["truncated"]
    infos[0].parts[0].unlink()
    assert kinds(infos[1], replace(other, id="b")) == ["empty", "truncated", "wrong_answer", None]
    infos[1].parts[1].unlink()
    assert kinds(infos[1]) == ["empty", "truncated"]
    assert kinds(other) == ["wrong_answer", None], "it is another run of this name"
    databases.close()


def test_a_group_has_its_samples_whole(client):
    key = {"run_id": '"a"', "phase": '"train"', "step": 1, "example_id": '"q2"', "sample_index": 1}
    answer = client.get("/group", params={"run": "a", **key}).json()
    assert answer["samples"] == 3
    assert [row["response"] for row in answer["rows"]] == [f"Step 1 SAYS 2{s}" for s in range(3)]
    assert [row["sample_index"] for row in answer["rows"]] == [0, 1, 2]
    assert answer["rows"][0]["centinats"] == [25] * 14
    assert answer["rows"][0]["has_tokenizer"] is False


def test_a_large_group_is_cut_but_has_the_sample_that_is_asked_for(tmp_path):
    with RunDir.create(tmp_path, "eval", name="r", metadata=metadata()) as run:
        rows = [rollout("r", "q", s, phase="eval", reward=float(s >= 60)) for s in range(100)]
        commit(run, 0, rows, phase="eval")
    with open_app(Library(tmp_path), token="") as app:
        client = TestClient(app, base_url="http://127.0.0.1")
        key = {"run_id": '"r"', "phase": '"eval"', "step": 0, "example_id": '"q"', "sample_index": 90}
        answer = client.get("/group", params={"run": "r", **key}).json()
    assert (answer["samples"], answer["right"]) == (100, 40)
    assert [row["sample_index"] for row in answer["rows"]] == [*range(64), 90]


def test_places_are_where_a_question_was_asked(client):
    places = client.get("/places", params=[("run", "b"), ("run", "a"), ("example_id", '"q3"')]).json()["places"]
    assert [(p["run_id"], p["phase"], p["step"]) for p in places] == [
        *(("b", "eval", 4), ("b", "train", 0), ("b", "train", 1), ("b", "train", 2), ("b", "train", 3)),
        *(("a", "eval", 3), ("a", "train", 0), ("a", "train", 1), ("a", "train", 2)),
    ]
    assert {(p["samples"], p["right"]) for p in places} == {(3, 2)}  # a failed grade is not right


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/rollouts?step=x", "step is missing, or is not JSON"), ("/rollouts?step=[1]", "neither text"),
        ("/rollouts?step=1e400", "neither text"), ("/rollouts?step=99999999999999999999", "too large"),
        ("/rollouts?reward=big", "reward is 'big'"), ("/rollouts?sort=prompt", "sort is 'prompt'"),
        ("/rollouts?sort=step;DROP", "sort is"), ("/rollouts?first=-1", "not a whole number"),
        ("/rollouts?first=1e9", "not a whole number"), ("/group", "run_id is missing"), ("/places", "example_id is missing"),
        ("/group?run_id=%22z%22&phase=1&step=1&example_id=1&sample_index=1", "There is no run"),
        (f"/rollouts?step={'[' * 20_000}", "is not JSON"),
        (f"/rollouts?words={'a' * 501}", "The search has 501 characters. Search for 500 at most"),
    ],
)  # fmt: skip
def test_a_bad_request_says_what_is_wrong(client, path, words):
    answer = client.get(f"{path}{'&' if '?' in path else '?'}run=a")
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_a_long_search_is_searched_for_whole(tmp_path):
    long = "a" * 499
    with RunDir.create(tmp_path, "grpo", name="r", metadata=metadata()) as run:
        commit(run, 0, [rollout("r", "q", s, response=long + end) for s, end in enumerate("bc")])
    with open_app(Library(tmp_path), token="") as app:
        answer = TestClient(app, base_url="http://127.0.0.1").get("/rollouts", params={"run": "r", "words": f"{long}c"})
    assert [row["sample_index"] for row in answer.json()["rows"]] == [1]


@pytest.mark.parametrize("words", ["'; DROP TABLE rollouts; --", "%_", "\\", "\x00", "\ud800"])
def test_words_are_text_and_no_sql(client, words):
    answer = client.get("/rollouts", params={"run": "a", "words": words.encode(errors="surrogatepass")})
    assert answer.json()["found"] == 0


def test_hostile_text_is_no_markup(tmp_path):
    hostile = "</script><img src=x onerror=alert(1)>\u202e\x1b[0m"
    with RunDir.create(tmp_path, "grpo", name="r", metadata=metadata(**{hostile: hostile})) as run:
        commit(run, 0, [rollout("r", hostile, 0, response=hostile, prompt=hostile, category=hostile)])
        with run.activity.doing(hostile), open_app(Library(tmp_path), token="") as app:
            client = TestClient(app, base_url="http://127.0.0.1")
            for path, names in (("/", {}), ("/view", {"run": "r"}), ("/view", {"run": hostile})):
                text = client.get(path, params=names).text
                assert "<img" not in text
                assert "\u202e" not in text
            answer = client.get("/rollouts?run=r")
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["rows"][0]["example_id"] == hostile


def test_rollouts_that_are_committed_are_there_for_the_next_request(tmp_path):
    with (
        RunDir.create(tmp_path, "grpo", name="r", metadata=metadata()) as run,
        open_app(Library(tmp_path), token="") as app,
    ):
        client = TestClient(app, base_url="http://127.0.0.1")
        assert client.get("/rollouts?run=r").json() == {"found": 0, "total": 0, "rows": []}
        for step in range(3):
            commit(run, step, some_rollouts("r", step))
            answer = client.get("/rollouts?run=r").json()
            assert answer["found"] == answer["total"] == 12 * (step + 1)
            assert answer["rows"][0]["step"] == step


def test_the_run_that_is_being_written_comes_first(tmp_path):
    make_run(tmp_path, "a")
    with (
        RunDir.create(tmp_path, "grpo", name="z", metadata=metadata()) as run,
        open_app(Library(tmp_path), token="") as app,
    ):
        commit(run, 0, some_rollouts("z", 0))
        client = TestClient(app, base_url="http://127.0.0.1")
        rows = client.get("/rollouts?run=a&run=z").json()["rows"]
    assert [row["run_id"] for row in rows] == ["z"] * 12 + ["a"] * 13


def test_requests_at_the_same_time_do_not_wait_for_a_slow_one(client, monkeypatch):
    entered, go_on = threading.Event(), threading.Event()
    answer = live_rollouts._order

    def slow(asked):
        if asked.get("sort") == "step":
            entered.set()
            assert go_on.wait(30)
        return answer(asked)

    monkeypatch.setattr(live_rollouts, "_order", slow)
    found = []
    waiting = threading.Thread(target=lambda: found.append(client.get("/rollouts?run=a&sort=step").json()["found"]))
    waiting.start()
    assert entered.wait(30)
    assert client.get("/rollouts?run=a").json()["found"] == 48
    assert not found
    go_on.set()
    waiting.join()
    assert found == [48]


def test_a_query_that_takes_too_long_is_stopped_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(live_rollouts, "SECONDS", 0.1)
    monkeypatch.setattr(live_rollouts, "_WORDS", ENDLESS)
    make_run(tmp_path, "a")
    with open_app(Library(tmp_path), token="") as app:
        answer = TestClient(app, base_url="http://127.0.0.1").get("/rollouts?run=a&words=x")
    assert answer.status_code == 504, "the page does not ask for it again"
    assert "was stopped after" in answer.json()["error"]


def test_a_query_for_which_nobody_waits_any_more_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(live_rollouts, "SECONDS", 5.0)
    monkeypatch.setattr(live_rollouts, "_WORDS", ENDLESS)
    make_run(tmp_path, "a")
    scope = {
        **{"type": "http", "method": "GET", "path": "/rollouts", "query_string": b"run=a&words=x"},
        "headers": [(b"host", b"127.0.0.1")],
    }
    said = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        said.append(message)

    with open_app(Library(tmp_path), token="") as app:
        asyncio.run(app(scope, receive, send))
    assert b"Nobody waits" in said[1]["body"]


def test_a_page_lacks_what_takes_too_long_and_says_what_shows_it(tmp_path, monkeypatch):
    """Of a run of a hundred million rollouts nothing was shown."""
    never = "SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range + b.range = 1"
    endless = {"summary": replace(named_queries()["summary"], sql=never)}
    with RunDir.create(tmp_path, "grpo", name="a", metadata=metadata()) as run:
        commit(run, 0, some_rollouts("a", 0, phase="eval"), phase="eval")
    monkeypatch.setattr(pages, "SECONDS", 1.0)
    monkeypatch.setattr(summary, "named_queries", lambda: endless)
    monkeypatch.setattr(comparison, "_EVALUATIONS", never)
    with open_app(Library(tmp_path), token="") as app:
        found = TestClient(app, base_url="http://127.0.0.1").get("/view?run=a")
    assert found.status_code == 200
    stopped, more = (
        "left out. The query was stopped after 1 seconds. To see it: <code>rlvr analyze",
        "--timeout-seconds 3600</code>",
    )
    assert re.findall('<p class="note">(.*?left out.*?)</p>', found.text) == [
        f"The intervals of the held-out reward are {stopped} curves {tmp_path}/a --plot curves.svg {more}",
        f"The summary of eval 0 of a is {stopped} summary {tmp_path}/a --phase eval --step 0 {more}",
    ]
    assert '<div class="charts">' in found.text  # the curves themselves are there
    assert "None of these runs has rollouts" not in found.text


def test_alarms_that_take_too_long_are_left_out(tmp_path, monkeypatch):
    make_run(tmp_path, "a", steps=1)

    never = "SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range + b.range = 1 AND 'a' IN $runs"
    monkeypatch.setattr(pages, "SECONDS", 0.5)
    monkeypatch.setattr(alarms, "_CURVES", never)
    with open_app(Library(tmp_path), token="") as app:
        answer = TestClient(app, base_url="http://127.0.0.1").get("/view?run=a")
    assert answer.status_code == 200
    (section,) = re.findall('<section id="alarms".*?</section>', answer.text, re.DOTALL)
    assert "The alarms of a are left out. The query was stopped after 0.5 seconds.</p>" in section
    assert "None." not in section


def test_databases_are_lent_again_only_for_the_same_rollouts(root):
    info = read_run(root / "a")
    databases = live_rollouts.Databases()
    with databases.lease([info]) as first, databases.lease([info]) as second:
        assert second is not first
    with databases.lease([info]) as third:
        assert third in (first, second)
        with databases.lease([replace(info, id="b")]) as renamed:
            assert renamed not in (first, second)
    few = read_run(root / "b")
    for _ in range(live_rollouts.IDLE + 2):
        with databases.lease([few]):
            pass
    databases.close()


@pytest.mark.parametrize(
    "number", [signal.SIGHUP, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGTERM))]
)
def test_a_signal_in_the_middle_of_an_answer_ends_the_server_after_it_and_a_script_goes_on(number):
    script = f"""
import asyncio, logging, signal, socket, threading, urllib.request
from rlvr_cli.analysis.live.server import listen, serve

signal.signal({number:d}, signal.default_int_handler)

async def app(scope, receive, send):
    signal.raise_signal({number:d})
    await send({{"type": "http.response.start", "status": 200, "headers": []}})
    await send({{"type": "http.response.body", "body": b"whole"}})

listener = listen("127.0.0.1", 0)
address = f"http://127.0.0.1:{{listener.getsockname()[1]}}"
ask = threading.Thread(target=lambda: print(urllib.request.urlopen(address, timeout=30).read().decode()))
serve(app, listener, started=ask.start, has_process=False)
ask.join()
print(signal.getsignal({number:d}) is signal.default_int_handler, logging.getLogger("uvicorn.error").filters)

async def endless(scope, receive, send):
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    await asyncio.sleep(3600)

listener = listen("127.0.0.1", 0)
client = socket.create_connection(listener.getsockname())
client.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
serve(endless, listener, started=lambda: None, has_process=False)
print("goes on")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "whole\nTrue []\ngoes on\n", "")


def test_an_answer_that_does_not_end_is_given_up_quietly_at_the_second_ctrl_c(tmp_path):
    script = """
import asyncio, signal, socket, threading
from starlette.concurrency import run_in_threadpool
from rlvr_cli.analysis.live.server import listen, serve
from rlvr_cli.analysis.queries.database import open_runs

opened = threading.Event()

def ask():
    with open_runs([], timeout_seconds=3600) as database:
        opened.set()
        database.select("SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range + b.range = 1")

async def app(scope, receive, send):
    asked = asyncio.ensure_future(run_in_threadpool(ask))
    while not opened.is_set():
        await asyncio.sleep(0.01)
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    await asked

listener = listen("127.0.0.1", 0)
client = socket.create_connection(listener.getsockname())
client.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
serve(app, listener, started=lambda: print("started", flush=True), has_process=True)
"""
    command, env = [sys.executable, "-c", script], {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")
    assert not list(tmp_path.iterdir()), "the query's folder is removed"
