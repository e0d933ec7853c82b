"""`rlvr view` as a command: the address that it prints answers, Ctrl-C ends it, and what it cannot serve is said in two lines."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from http.cookiejar import CookieJar

import pytest

from factories import a_rollout
from rlvr_cli.commands.store import view
from rlvr_cli.config.store.view import ViewConfig
from rlvr_cli.errors import RlvrError, UsageError
from rlvr_cli.runs.run_dir import RunDir

installed = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")),
    reason="the extra view is not installed",
)


@pytest.fixture
def runs(tmp_path):
    for name in ("a", "b"):
        with RunDir.create(tmp_path / "runs", "eval", name=name, metadata={}) as run:
            run.commit_rollouts("eval", 0, [a_rollout(run_id=name, phase="eval", step=0)])
    return tmp_path / "runs"


class Served:
    """A `rlvr view` under way."""

    def __init__(self, *words, cwd, env=None) -> None:
        command = [sys.executable, "-m", "rlvr_cli", "view", *map(str, words)]
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.address = self.process.stdout.readline().strip()
        self.browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))

    def get(self, path="") -> str:
        with self.browser.open(self.address.partition("?")[0] + path, timeout=60) as answer:
            return answer.read().decode()

    def enter(self) -> None:
        self.browser.open(self.address, timeout=60).close()

    def end(self, number=signal.SIGINT) -> tuple[int, str, str]:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            pipe.close()


@pytest.fixture
def serve(forked, tmp_path):
    made = []

    def start(*words, **named):
        made.append(Served(*words, "--no-open", cwd=tmp_path, **named))
        return made[-1]

    yield start
    for one in made:
        one.close()


@installed
@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGHUP))]
)
def test_the_printed_address_answers_and_a_signal_ends_it_quietly(serve, runs, tmp_path, number):
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("the signal is ignored here, as under nohup, and so in what is started from here")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    served = serve(env={"TMPDIR": str(scratch)})
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", served.address)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        served.get()
    served.enter()
    assert set(re.findall('data-run="([^"]*)"', served.get())) == {"a", "b"}
    assert '"found":1' in served.get("rollouts?run=a")
    assert list(scratch.iterdir())  # a database that is kept for the next query
    status, out, err = served.end(number)
    assert (status, out) == (0, "")
    assert err == "Runs in runs; Ctrl-C ends it\n"
    assert not list(scratch.iterdir())


@pytest.mark.slow
@installed
def test_nothing_is_written_into_the_runs_of_another_directory(serve, runs):
    others = runs.rename(runs.with_name("others"))

    def files():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in others.rglob("*")}

    before = files()
    served = serve("--runs-dir", others, "--no-token", "--host", "localhost")
    assert served.address.startswith("http://localhost:")
    assert served.get().count("data-run") == 2
    for path in ("view?run=a&run=b", "rollouts?run=a", "facets?run=a"):
        served.get(path)
    served.end()
    assert files() == before


@pytest.mark.slow
@installed
def test_named_runs_alone_are_served_on_a_chosen_port(serve, runs):
    from rlvr_cli.analysis.live.server import listen

    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        taken = serve("a", "--port", port)
        status, _, err = taken.end() if taken.address else (taken.process.wait(60), "", taken.process.stderr.read())
        assert status == 1
        assert err.startswith(f"error: Cannot listen on 127.0.0.1, port {port}: ")
    served = serve("a", "--port", port, "--no-token")
    assert served.address == f"http://127.0.0.1:{port}/"
    assert re.findall('data-run="([^"]*)"', served.get()) == ["a"]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        served.get("view?run=b")


def test_patterns_of_runs(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs.parent)
    (runs / "notes.txt").write_text("no run")
    for names in (("[ab]",), ("runs/*",), ("runs/a", "runs/b", "runs/notes.txt")):
        root, found = view.named_runs(ViewConfig(runs=names))
        assert (root, [path.name for path in found]) == (None, ["a", "b"])
    assert capsys.readouterr().err.count("passed over, since no run: runs/notes.txt") == 2


@installed
@pytest.mark.slow
def test_two_starts_have_two_tokens(serve, runs):
    assert len({serve().address.partition("token=")[2] for _ in range(2)}) == 2


@installed
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({"host": "0.0.0.0", "token": False}, "--no-token lets everybody read the runs who can reach 0.0.0.0."),
        (
            {"host": "example.invalid", "token": False},
            "--no-token lets everybody read the runs who can reach example.invalid.",
        ),
        ({"runs_dir": "none"}, "There is no directory none."),
        ({"runs": ("none",)}, "There is no run 'none'"),
        ({"host": "example.invalid"}, "Cannot listen on example.invalid, port 0"),
        ({"host": "8.8.8.8"}, "Cannot listen on 8.8.8.8, port 0"),
    ],
)
def test_what_cannot_be_served(runs, monkeypatch, words, problem):
    monkeypatch.chdir(runs.parent)
    with pytest.raises(RlvrError) as raised:
        view.run(ViewConfig(open=False, **words))
    assert raised.value.problem.startswith(problem)
    assert raised.value.hint
    assert isinstance(raised.value, UsageError) == ("token" in words)


@pytest.mark.parametrize("words", [{"port": -1}, {"port": 65536}, {"host": ""}])
def test_wrong_options(words):
    with pytest.raises(RlvrError, match=r"--(port|host) is"):
        ViewConfig(**words)


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_without_the_extra_the_pip_line_is_said(monkeypatch, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else found(name, *rest) or True
    )
    with pytest.raises(RlvrError) as raised:
        view.run(ViewConfig())
    assert raised.value.problem == f"{package} is not installed."
    assert "pip install -e '.[view]'" in raised.value.hint


@installed
def test_the_browser_is_opened_at_the_address(forked, runs, tmp_path):
    seen = tmp_path / "seen"
    script = tmp_path / "firefox"
    script.write_text(f'#!/bin/sh\necho "$@" >> {seen}\n')
    script.chmod(0o755)
    # %s & is a browser in the background, as a desktop's is
    served = Served(cwd=tmp_path, env={"BROWSER": f"{script} %s &"})
    for _ in range(600):
        if seen.exists() and seen.read_text().endswith("\n"):
            break
        time.sleep(0.05)
    served.end()
    served.close()
    assert seen.read_text().strip() == served.address
