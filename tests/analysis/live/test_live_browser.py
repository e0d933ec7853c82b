"""`rlvr view` in a real browser, against a run that is being written: rows and points appear, and nothing is loaded from elsewhere.

Needs Chromium with its driver, and selenium; without them these tests are skipped.
"""

import asyncio
import shutil
import threading
from typing import Any
from urllib.parse import parse_qs

import pytest

pytest.importorskip("starlette", reason="starlette is not installed: pip install -e '.[view]'")

from starlette.requests import Request

from browsers import NEEDED, Page, chromium
from factories import a_rollout
from rlvr_cli.analysis.live.server import Library, listen, open_app
from rlvr_cli.runs.run_dir import RunDir

pytestmark = NEEDED
TOKEN = "the-token-of-this-test"


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


class Gate:
    """A slow server: while it is closed, requests for a list wait, and each is let through by itself."""

    def __init__(self) -> None:
        self.app: Any = None
        self.path, self.is_closed, self.asked, self.let, self.ended = "/rollouts", False, [], 0, 0

    async def __call__(self, scope, receive, send) -> None:
        if scope["path"] == self.path and self.is_closed:
            self.asked.append(parse_qs(scope["query_string"].decode()))
            number = len(self.asked)
            while self.is_closed and self.let < number:
                await asyncio.sleep(0.01)
                if await Request(scope, receive).is_disconnected():
                    self.ended += 1
                    return
        await self.app(scope, receive, send)


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def served(browser, tmp_path, gate):
    """The address of a server of the runs in `tmp_path`, with its token."""
    import uvicorn

    with listen("127.0.0.1", 0) as listener, open_app(Library(tmp_path), token=TOKEN) as gate.app:
        server = uvicorn.Server(uvicorn.Config(gate, log_level="error", access_log=False, lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        gate.is_closed = False
        browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
        browser.get("about:blank")  # a page that goes on asking would find nobody
        browser.get_log("browser")
        server.should_exit = True
        thread.join()


def rollout(run_id, example, sample, *, step=0, right=False, **changes):
    response = f"step {step} of {run_id} says {example}"
    values = {
        "run_id": run_id, "phase": "train", "step": step, "policy_version": step, "example_id": example, "sample_index": sample,
        "prompt": f"What is {example}?", "response": response, "response_ids": tuple(response.encode()),
        "sampled_logprobs": tuple(-0.25 for _ in response.encode()), "num_response_tokens": len(response.encode()),
        "answer_reward": float(right), "reward": float(right), "extracted_answer": "7", "category": f"format_1_answer_{int(right)}",
        "failure_kind": None if right else "wrong_answer",
    }  # fmt: skip
    return a_rollout(**{**values, **changes})


def commit(run, name, step, **changes):
    rows = [rollout(name, f"q{q}", s, step=step, right=s < step, **changes) for q in range(3) for s in range(2)]
    run.commit_rollouts("train", step, rows)
    run.commit_metrics(step, "train", {"reward/mean": step / 4})


def enter(browser, address) -> None:
    """Open the address with the token, and wait until it is left."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(f"{address}?token={TOKEN}")
    WebDriverWait(browser, 30, poll_frequency=0.1).until(lambda _: browser.current_url == address)


@pytest.mark.slow
def test_rows_and_points_appear_while_a_run_trains(browser, served, tmp_path):
    with RunDir.create(tmp_path, "grpo", name="a", metadata={}) as run:
        commit(run, "a", 0)
        enter(browser, served)
        assert browser.get_cookies()[0]["httpOnly"] is True
        page = Page(browser, f"{served}view?run=a")
        page.js("window.__same = true")  # a reload would lose it
        assert page.settled() == "1 to 6 of 6 rollouts"
        assert page.column("step") == ["0"] * 6
        assert len(page.all("#curves .marker")) == 1
        page.open(1)
        page.js("document.querySelector('#configuration').scrollIntoView()")
        commit(run, "a", 1)
        page.until(lambda: page.all(".status")[0].text == "1 to 12 of 12 rollouts")
        assert page.column("step") == ["1"] * 6 + ["0"] * 6
        page.until(lambda: len(page.all("#curves .marker")) == 2)
        assert page.text("pre.response") == "step 0 of a says q0"  # the open rollout stays
        assert page.js("return document.querySelector('.list tr[aria-current]').rowIndex") == 8
        page.choose("step", "1")
        page.until(lambda: page.all(".status")[0].text == "1 to 6 of 6 rollouts (of 12 in all)")
        commit(run, "a", 2)
        page.until(lambda: page.all(".status")[0].text == "1 to 6 of 6 rollouts (of 18 in all)")
        assert page.js("return [...document.querySelectorAll('#filter-step option')].map(o => o.textContent)") == [
            *("all", "0", "1", "2")
        ]
        assert page.js("return document.querySelector('#filter-step').value") == "1"
        assert page.text(".state") == "running"
        assert {url.split("?")[0] for url in page.requests()} <= {
            f"{served}{name}" for name in ("view", "facets", "rollouts", "group", "places")
        }
        with run.activity.doing("sampling", total=64, unit="responses"):
            page.until(lambda: "sampling, 0 of 64" in page.text(".runs"))
            page.requests()
            page.until(
                lambda: [url for url in page.requests() if "/view" in url]
            )  # what was committed has been asked for
            run.activity.progress()
            page.until(lambda: "sampling, 1 of 64" in page.text(".runs"))
            assert {url.split("?")[0] for url in page.requests()} <= {f"{served}view"}, "nothing was committed"
    page.until(lambda: page.text(".state") == "finished")
    assert page.js("return window.__same")
    assert page.is_unharmed()
    assert not browser.get_log("browser")


@pytest.mark.slow
def test_previous_and_next_go_on_from_a_rollout_that_new_ones_move_off_the_page(browser, served, tmp_path):
    with RunDir.create(tmp_path, "grpo", name="a", metadata={}) as run:
        commit(run, "a", 0)
        enter(browser, served)
        page = Page(browser, f"{served}view?run=a")
        page.settled()
        page.open(1)

        def go(by, to, status):
            page.all(".moves button")[by].click()
            page.until(lambda: page.text("#rollout h3") == to)
            page.until(lambda: page.all(".status")[0].text == status)

        def grow(steps, status):
            for step in steps:
                commit(run, "a", step)
            page.until(lambda: page.all(".status")[0].text == status)

        grow(range(1, 6), "1 to 25 of 36 rollouts")
        go(1, "q1 · sample 0", "26 to 36 of 36 rollouts")
        go(0, "q0 · sample 1", "26 to 36 of 36 rollouts")
        page.one("[data-sort=step]").click()
        page.one("[data-sort=step]").click()  # upwards: new rows come last
        assert page.settled() == "1 to 25 of 36 rollouts"
        page.one("#page-last").click()
        grow(range(6, 12), "26 to 50 of 72 rollouts")
        go(1, "q1 · sample 0", "1 to 25 of 72 rollouts")
        page.one("[data-sort=example_id]").click()
        page.settled()
        page.choose("step", "0")
        page.choose("step", "all")
        page.one("#page-next").click()
        page.until(lambda: page.all(".status")[0].text == "26 to 50 of 72 rollouts")
        page.open(0)
        page.one("#page-first").click()
        grow(range(12, 24), "1 to 25 of 144 rollouts")  # some before it, and some behind
        here = page.text("#rollout h3")
        page.all(".moves button")[1].click()
        page.until(lambda: "The list has changed" in page.text(".moves .note"))
        assert page.text("#rollout h3") == here
        assert not any(button.is_enabled() for button in page.all(".moves button")[:2])
        page.one("[data-sort=step]").click()
        page.one("[data-sort=step]").click()
        page.settled()
        assert page.column("step")[0] == "0"
        page.open(0)
        page.one("#page-next").click()
        page.until(lambda: page.all(".status")[0].text == "26 to 50 of 144 rollouts")
        grow(range(24, 27), "26 to 50 of 162 rollouts")
        page.all(".moves button")[0].click()
        page.until(lambda: not page.all(".moves button")[0].is_enabled())
        page.until(lambda: page.all(".status")[0].text == "1 to 25 of 162 rollouts")
        page.settled()
        go(1, "q0 · sample 1", "1 to 25 of 162 rollouts")  # there was none before the first


@pytest.mark.slow
def test_one_list_is_asked_for_at_a_time_and_shown_unless_another_is_wanted(browser, served, tmp_path, gate):
    with RunDir.create(tmp_path, "grpo", name="a", metadata={}) as run:
        commit(run, "a", 0)
        commit(run, "a", 1)
    enter(browser, served)
    page = Page(browser, f"{served}view?run=a")
    assert page.settled() == "1 to 12 of 12 rollouts"
    gate.is_closed = True

    def choose(step):
        change = "s.value = arguments[0]; s.dispatchEvent(new Event('change'))"
        page.js(f"const s = document.querySelector('#filter-step'); {change}", step)

    for step in ("0", "", "0", "1"):
        choose(step)
        page.until(lambda step=step: gate.asked and gate.asked[-1].get("step", [""]) == [step])
    page.until(lambda: gate.ended == 3)  # each ends the one before
    page.until(lambda: page.text(".status") == "Asking …")
    assert page.column("step") == ["1"] * 6 + ["0"] * 6
    for _ in range(3):
        choose("1")  # as when something was committed: the question is the same
    assert len(gate.asked) == 4
    gate.let = 4
    page.until(lambda: page.column("step") == ["1"] * 6)
    page.until(lambda: len(gate.asked) == 5)
    assert page.text(".status") == "1 to 6 of 6 rollouts (of 12 in all)"
    assert page.js("return document.querySelector('.listing').ariaBusy") == "true"
    gate.is_closed = False
    page.settled()
    assert (len(gate.asked), gate.ended) == (5, 3)
    page.js(
        "const timeout = AbortSignal.timeout.bind(AbortSignal); AbortSignal.timeout = (wait) => timeout(wait / 200)"
    )
    gate.is_closed = True
    choose("")
    page.until(lambda: "timed out" in page.text(".status"))
    gate.is_closed = False
    page.until(lambda: page.text(".status") == "1 to 12 of 12 rollouts")


@pytest.mark.slow
def test_the_choices_of_the_filters_are_asked_for_one_at_a_time(browser, served, tmp_path, gate):
    with RunDir.create(tmp_path, "grpo", name="a", metadata={}) as run:
        commit(run, "a", 0)
    enter(browser, served)
    page = Page(browser, f"{served}view?run=a")
    page.settled()
    gate.path, gate.is_closed = "/facets", True
    for _ in range(4):
        page.js("document.dispatchEvent(new Event('rlvr-changed'))")
        page.until(lambda: gate.asked)
    gate.let = 1
    page.until(lambda: len(gate.asked) == 2)
    gate.is_closed = False
    page.settled()
    assert len(gate.asked) == 2


@pytest.mark.slow
def test_a_list_that_failed_is_asked_for_again(browser, served, tmp_path):
    with RunDir.create(tmp_path, "grpo", name="a", metadata={}) as run:
        commit(run, "a", 0)
        enter(browser, served)
        page = Page(browser, f"{served}view?run=a")
        page.settled()

        def block(*urls):
            browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": urls})
            page.js("document.querySelector('.status').textContent = ''")

        block("*/facets?*")
        commit(run, "a", 1)
        page.until(lambda: page.all(".status")[0].text == "1 to 12 of 12 rollouts")
        missing = "These choices are missing or out of date: Failed to fetch"
        assert page.text("#browser > .note") == missing
        block("*/rollouts?*")
        page.until(lambda: page.all(".status")[0].text == "Failed to fetch")
        block()
        page.until(lambda: page.all(".status")[0].text == "1 to 12 of 12 rollouts")
        assert page.text("#browser > .note") == ""
    page.js("arguments[0].value = 'x'.repeat(501); arguments[0].dispatchEvent(new Event('input'))", page.one("#search"))
    page.until(lambda: "500" in page.text(".status"))
    assert page.js("return document.documentElement.dataset.committed"), "what is refused is not asked for again"
    browser.get_log("browser")


@pytest.mark.slow
def test_a_rollout_that_cannot_be_opened_leaves_the_one_that_is_shown(browser, served, tmp_path):
    with RunDir.create(tmp_path, "grpo", name="a", metadata={}) as run:
        commit(run, "a", 0)
    enter(browser, served)
    page = Page(browser, f"{served}view?run=a")

    def block(*urls):
        browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": urls})

    def refuse(place, url):
        block(url)
        page.all(".list tbody tr")[place].find_element("css selector", "button").click()

    def current():
        return page.js(
            "return [...document.querySelectorAll('.list tbody tr[aria-current]')].map((row) => row.rowIndex)"
        )

    refuse(3, "*/group?*")
    page.until(lambda: page.all("#rollout [role=alert]"))
    assert current() == []
    page.one("#close").click()
    assert page.one("#rollout").text == ""
    assert not page.all(".layout.open")
    for _ in range(2):
        refuse(3, "*/group?*")
        page.until(lambda: page.all("#rollout [role=alert]"))
    block()
    page.open(0)
    assert not page.all("#rollout [role=alert]")
    refuse(4, "*/places?*")
    page.until(lambda: page.all("#rollout [role=alert]"))
    assert page.text("#rollout [role=alert]") == "q2 · sample 0 could not be opened: Failed to fetch"
    assert page.text("#rollout h3") == "q0 · sample 0"
    assert current() == [1]
    assert page.settled() == "1 to 6 of 6 rollouts"
    block()
    page.all(".moves button")[1].click()
    page.until(lambda: page.text("#rollout h3") == "q0 · sample 1")
    assert current() == [2]
    assert not page.all("#rollout [role=alert]")
    browser.get_log("browser")


@pytest.mark.slow
def test_the_list_grows_and_keeps_what_was_chosen(browser, served, tmp_path):
    diverged = {"diverged": {"why": "it went wrong"}}
    for name in ("a", "b"):
        with RunDir.create(tmp_path, "grpo", name=name, metadata=diverged) as run:
            commit(run, name, 1)
            run.finish("diverged")
    enter(browser, served)

    def js(script):
        return browser.execute_script(f"return {script}")

    def names():
        return js("[...document.querySelectorAll('.runs tbody tr')].map(r => r.dataset.run)")

    from selenium.webdriver.support.ui import WebDriverWait

    until = WebDriverWait(browser, 30, poll_frequency=0.1).until
    for name in ("b", "a"):
        browser.find_element("css selector", f"[value={name}]").click()
    browser.set_window_size(500, 800)
    browser.execute_script(
        "document.querySelector('[data-run=a] a').focus(); document.querySelector('.wide').scrollLeft = 40"
    )
    with RunDir.create(tmp_path, "grpo", name="c", metadata=diverged) as run:
        commit(run, "c", 0)
        until(lambda _: set(names()) == {"a", "b", "c"})
    assert js("[document.activeElement.textContent, document.querySelector('.wide').scrollLeft]") == ["a", 40]
    browser.set_window_size(1400, 1000)
    for order, expected in (("name", ["a", "b", "c"]), ("newest", ["c", "b", "a"])):
        browser.find_element("css selector", f".orders [href='?order={order}']").click()
        until(lambda _, expected=expected: names() == expected)
        assert browser.current_url == f"{served}?order={order}"
        assert js("document.activeElement.getAttribute('aria-current')") == "true"
    assert set(js("[...document.querySelectorAll(':checked')].map(b => b.value)")) == {"a", "b"}
    browser.find_element("css selector", "button[type=submit]").click()
    until(lambda _: browser.current_url.startswith(f"{served}view?"))
    assert set(js("document.querySelector('h1').textContent").split(", ")) == {"a", "b"}
    assert js("document.querySelector('#comparison').textContent.trim()").startswith("They cannot be compared.")

    page = Page(browser, f"{served}view?run=a&run=b&run=c")
    page.all("#alarms summary")[1].click()
    unfolded = "[...document.querySelectorAll('#alarms details')].map(d => d.open)"
    with RunDir.resume(tmp_path / "c") as run:
        commit(run, "c", 1)
        run.finish("diverged")
    until(lambda _: len(js(unfolded)) == 3)
    assert js(unfolded) == [False, True, False]
    shutil.rmtree(tmp_path / "c")
    page.until(lambda: page.text("#liveness") == "There is no run c here.")
    browser.get_log("browser")


@pytest.mark.slow
def test_the_same_question_in_two_runs_is_shown_side_by_side(browser, served, tmp_path):
    for name in ("a", "b"):
        with RunDir.create(tmp_path, "grpo", name=name, metadata={}) as run:
            commit(run, name, 0)
            commit(run, name, 1)
    enter(browser, served)
    page = Page(browser, f"{served}view?run=a&run=b")
    assert page.settled() == "1 to 24 of 24 rollouts"
    page.search("of b says q1")
    page.open(0)
    assert [e.text for e in page.all(".place")] == ["0 0/2", "1 1/2", "0 0/2", "1 1/2"]
    page.all(".place")[0].click()
    page.until(lambda: page.all(".pairs"))
    assert [e.text.partition(":")[0] for e in page.all(".pairs h4")] == ["b, train, step 1", "a, train, step 0"]
    assert [e.text for e in page.all(".card pre")] == ["step 1 of b says q1", "step 0 of a says q1"] * 2


@pytest.mark.slow
def test_a_group_that_is_not_whole_says_how_large_it_is(browser, served, tmp_path):
    with RunDir.create(tmp_path, "grpo", name="a", metadata={}) as run:
        run.commit_rollouts("train", 0, [rollout("a", "q", s, right=s > 60) for s in range(70)])
    enter(browser, served)
    page = Page(browser, f"{served}view?run=a")
    page.open(0)
    assert page.text("#samples h4") == "The group: 70 samples, 9 with a reward above 0.5"
    assert page.text("#samples > p.note") == "6 more samples are in the list alone."
    page.one("#samples > button").click()
    assert len(page.all(".card")) == 64


# The script that shows rollouts is the report's, whose test in a browser is not slow.
@pytest.mark.slow
def test_hostile_rollouts_of_a_server_are_only_text(browser, served, tmp_path):
    hostile = "</script><img src=x onerror='window.__pwned = 1'><script>window.__pwned = 2</script>\u202e"
    facts = {
        "prompt": hostile,
        "response": hostile,
        "category": hostile,
        "failure_kind": hostile,
        "extracted_answer": hostile,
    }
    with RunDir.create(tmp_path, "grpo", name="a", metadata={"config": {hostile: hostile}}) as run:
        run.commit_rollouts("train", 0, [rollout("a", hostile, s, **facts) for s in range(2)])
        enter(browser, served)
        page = Page(browser, f"{served}view?run=a")
        page.open(0)
        assert page.text("pre.response") == hostile.replace("\u202e", "\\u202e")
        run.commit_rollouts("train", 1, [rollout("a", "plain", 0, step=1)])
        with run.activity.doing(hostile):
            page.until(lambda: "onerror" in page.text(".runs"))  # a section that came later
            page.until(lambda: page.all(".status")[0].text == "1 to 3 of 3 rollouts")
    assert page.is_unharmed()
    assert not browser.get_log("browser")


@pytest.mark.slow
def test_a_server_that_is_gone_is_said_to_be(browser, tmp_path):
    import uvicorn

    with RunDir.create(tmp_path, "grpo", name="a", metadata={}) as run:
        commit(run, "a", 0)
    with listen("127.0.0.1", 0) as listener, open_app(Library(tmp_path), token="") as app:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        page = Page(browser, f"http://127.0.0.1:{listener.getsockname()[1]}/view?run=a")
        server.should_exit = True
        thread.join()
    page.until(lambda: page.text("#liveness") == "The server does not answer.")
    browser.get_log("browser")
