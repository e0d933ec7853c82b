"""The report in a real browser: what its filters, search and list do, and what hostile rollouts cannot.

Needs Chromium with its driver, and selenium; without them these tests are skipped.
"""

import json
import socket
import threading

import pytest

from browsers import NEEDED, Page, chromium
from factories import a_conversation, a_rollout
from marks import slow
from rlvr_cli.analysis.report.build import write_report
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Judgement

pytestmark = NEEDED


class Listener:
    """Counts who connects to a port of this machine."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.connections = 0
        self.thread = threading.Thread(target=self._count)
        self.thread.start()

    def _count(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.connections += 1
            connection.close()

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.thread.join()


@pytest.fixture
def listener():
    made = Listener()
    yield made
    made.close()


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


def opened(browser, path) -> Page:
    """A report that is open in the browser."""
    return Page(browser, path.as_uri())


def rollout(run_id, example, sample, *, phase="eval", step=0, response="r", reward=0.0, **changes):
    correct = reward is not None and reward > 0.5
    values = {
        "run_id": run_id, "phase": phase, "step": step, "policy_version": step, "example_id": example,
        "sample_index": sample, "prompt": f"What is {example}?", "response": response,
        "response_ids": tuple(response.encode()), "sampled_logprobs": tuple(-0.25 * i for i, _ in enumerate(response.encode())),
        "num_response_tokens": len(response.encode()), "answer_reward": reward, "reward": reward,
        "extracted_answer": "7" if correct else "8", "category": f"format_1_answer_{int(correct)}",
        "failure_kind": None if correct else "wrong_answer", "mean_logprob": -0.25, "mean_entropy": 0.5, "seed": 2**62 + 1,
    }  # fmt: skip
    return a_rollout(**{**values, **changes})


def make_run(root, name, rollouts, *, tokenizer=True, diverged=""):
    with RunDir.create(root, "grpo", name=name, metadata={"diverged": {"why": diverged}} if diverged else {}) as run:
        for phase, step in sorted({(r.phase, r.step) for r in rollouts}):
            run.commit_rollouts(phase, step, [r for r in rollouts if (r.phase, r.step) == (phase, step)])
        if diverged:  # an alarm
            run.finish("diverged")
    if tokenizer:  # of bytes
        themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [b for b in range(256) if b not in themselves]
        vocabulary = {chr(b): b for b in themselves} | {chr(256 + i): b for i, b in enumerate(others)}
        document = {"model": {"type": "BPE", "vocab": vocabulary}, "decoder": {"type": "ByteLevel"}, "added_tokens": []}
        (root / name / "model").mkdir()
        (root / name / "model" / "tokenizer.json").write_text(json.dumps(document))
    return root / name


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Run a: 3 steps of 4 groups of 4, in which sample i of question i was right; run b: 30 evaluated questions."""
    root = tmp_path_factory.mktemp("two-runs")
    train = [
        rollout("a", f"a-{q}", s, phase="train", step=step, reward=float(s == q), response=f"step {step} says {q}{s}",
                advantage=1.5 if s == q else -0.5)
        for step in range(3) for q in range(4) for s in range(4)
    ]  # fmt: skip
    failed = {
        "reward": None,
        "category": "grade_error",
        "failure_kind": None,
        "grade_error": "timeout",
        "grade_error_detail": "mine.py:3: too slow",
        "extracted_answer": None,
    }
    evaluated = [rollout("b", f"b-{q}", 0, response=f"b{q}", **(failed if q == 29 else {})) for q in range(30)]
    runs = [make_run(root, "a", train), make_run(root, "b", evaluated, tokenizer=False)]
    return write_report(runs, root / "report.html")


@pytest.mark.slow
def test_filters_change_what_is_listed(browser, two_runs):
    page = opened(browser, two_runs)
    assert page.settled() == "1 to 25 of 78 rollouts"
    assert page.questions()[:5] == ["a-0", "a-0", "a-0", "a-0", "a-1"]
    assert page.choose("run_id", "b") == "1 to 25 of 30 rollouts (of 78 in this page)"
    assert page.choose("category", "grade_error") == "1 to 1 of 1 rollouts (of 78 in this page)"
    assert page.questions() == ["b-29"]
    page.one("#reset").click()
    assert page.settled() == "1 to 25 of 78 rollouts"
    page.choose("phase", "train")
    page.choose("step", "1")
    assert page.choose("reward", "above 0.5") == "1 to 4 of 4 rollouts (of 78 in this page)"
    assert page.questions() == ["a-0", "a-1", "a-2", "a-3"]
    assert page.column("sample_index") == ["0", "1", "2", "3"]
    assert page.choose("failure_kind", "wrong_answer").startswith("0 rollouts")
    page.one("#reset").click()
    assert page.choose("reward", "none: the grade failed").startswith("1 to 1 of 1 ")
    marked = "return document.querySelector('.listing').ariaBusy"
    events = {"filter-reward": "change", "search": "input"}
    for control, event in events.items():
        dispatch = f"document.querySelector('#{control}').dispatchEvent(new Event('{event}'));"
        assert page.js(dispatch + marked) == "true", "another list is on its way"
        page.settled()
        assert page.js(marked) == "false"
    page.one("#reset").click()
    page.settled()
    page.one("#page-last").click()
    assert page.settled() == "76 to 78 of 78 rollouts"
    words = "const s = document.querySelector('#search'); s.value = 'a-0'; s.dispatchEvent(new Event('input'));"
    page.js(words + "document.querySelector('#page-previous').click()")  # while the words wait for more of them
    assert page.settled().startswith("1 to ")
    assert page.is_unharmed()


@pytest.mark.slow
def test_long_names_of_runs_are_told_apart_in_the_list(browser, tmp_path):
    names = ["abl-reinforce_with_baseline-lr-1e-4-s0", "abl-reinforce_with_baseline-lr-3e-4-s0"]
    runs = [make_run(tmp_path, name, [rollout(name, "q", 0)], tokenizer=False) for name in names]
    page = opened(browser, write_report(runs, tmp_path / "report.html"))
    assert page.settled() == "1 to 2 of 2 rollouts"
    assert page.column("run_id") == ["…1e-4-s0", "…3e-4-s0"]
    titles = page.js("return [...document.querySelectorAll('tbody .col-run_id')].map((cell) => cell.title)")
    assert titles == names
    names = [f"abl-{loss}-of-the-handout-in-section-7-s0" for loss in ("a" * 30 + "x" * 30, "a" * 30 + "y" + "x" * 29)]
    runs = [make_run(tmp_path, name, [rollout(name, "q", 0)], tokenizer=False) for name in names]
    page = opened(browser, write_report(runs, tmp_path / "report.html"))
    assert page.settled() == "1 to 2 of 2 rollouts"
    assert page.column("run_id") == names, "no cut keeps them apart"
    assert page.is_unharmed()


@pytest.mark.slow
def test_pages_and_sorting(browser, two_runs):
    page = opened(browser, two_runs)
    assert len(page.questions()) == 25
    assert not page.one("#page-previous").is_enabled()
    page.one("#page-next").click()
    assert page.settled() == "26 to 50 of 78 rollouts"
    page.one("#page-last").click()
    assert page.settled() == "76 to 78 of 78 rollouts"
    assert page.questions() == ["b-27", "b-28", "b-29"]
    assert not page.one("#page-next").is_enabled()
    page.one("[data-sort=advantage]").click()
    assert page.settled() == "1 to 25 of 78 rollouts"
    values = page.column("advantage")
    assert values == ["1.5"] * 12 + ["-0.5"] * 13  # missing ones last
    page.one("[data-sort=advantage]").click()
    assert page.column("advantage")[0] == "-0.5"
    assert page.js("return document.querySelector('[data-sort=advantage]').parentNode.ariaSort") == "ascending"


@pytest.mark.slow
def test_search_finds_text_of_prompts_responses_and_ids(browser, two_runs):
    page = opened(browser, two_runs)
    assert page.search("SAYS 21") == "1 to 3 of 3 rollouts (of 78 in this page)"
    assert page.questions() == ["a-2"] * 3
    assert page.search("What is b-17?").startswith("1 to 1 of 1 ")
    assert page.search("says 99").startswith("0 rollouts")
    page.choose("step", "2")
    assert page.search("says 3").startswith("1 to 4 of 4 ")


@pytest.mark.slow
def test_a_rollout_is_shown_with_its_tokens_and_its_group(browser, two_runs):
    from selenium.webdriver.common.keys import Keys

    page = opened(browser, two_runs)
    page.choose("step", "2")
    page.open(5)  # a-1, sample 1
    assert page.text("pre.response") == "step 2 says 11"
    assert page.text("pre.prompt") == "What is a-1?"
    facts = dict(zip([e.text for e in page.all("dt")], [e.text for e in page.all("dd")], strict=True))
    assert facts["ground truth"] == "7"
    assert facts["extracted answer"] == "7"
    assert facts["advantage"] == "1.5"
    assert facts["seed"] == str(2**62 + 1)
    assert [e.text[:8] for e in page.all(".card")] == ["sample 0", "sample 1", "sample 2", "sample 3"]
    assert [e.text for e in page.all(".card pre")] == [f"step 2 says 1{s}" for s in range(4)]
    tokens = page.all("pre.response [data-token]")
    assert [t.text for t in tokens[:6]] == ["s", "t", "e", "p", " ", "2"]
    classes = [t.get_attribute("class") for t in tokens]
    assert classes[0] == "p0"  # log-probability 0
    assert classes[-1] == "p4"  # -3.25
    page.one("pre.response").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.text("output") == 'Token 2 of 14 "t": probability 0.7788 (log-probability -0.25)'
    page.all(".card button")[1].click()
    page.until(lambda: page.text("pre.response") == "step 2 says 12")
    assert page.is_unharmed()


@pytest.mark.slow
def test_what_a_judge_said_is_shown_below_the_response_and_a_very_long_response_whole(browser, tmp_path):
    reply = "It is <b>good</b>.\n<script>window.__pwned = 1</script>\n8"
    rows = [
        rollout("r", "q", 0, judgement=Judgement(reply, "8", "big", "00" * 32, 50, 5, cached=True)),
        rollout("r", "q", 1, judgement=Judgement("?", None, "big", "11" * 32, 51, 6, cached=False)),
        rollout("r", "q", 2),
        rollout("r", "r", 0, response="a" * 70_000),  # more tokens than a function takes arguments
    ]
    page = opened(browser, write_report([make_run(tmp_path, "r", rows)]))

    def facts():
        found = dict(zip([e.text for e in page.all("dt")], [e.text for e in page.all("dd")], strict=True))
        return [found.get(name) for name in ("judge", "judge's score", "judge's tokens")]

    page.open(0)
    assert page.js("return document.querySelector('pre.judgement').textContent") == reply
    assert facts() == ["big", "8", "50 asked, 5 in the reply; known, not asked again"]
    page.open(1)
    assert page.text("pre.judgement") == "?"
    assert facts() == ["big", "none", "51 asked, 6 in the reply"]
    page.open(2)
    assert not page.all("pre.judgement")
    assert facts() == [None] * 3
    page.open(3)
    assert page.js("return document.querySelectorAll('pre.response [data-token]').length") == 70_000
    assert page.is_unharmed()


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [True, False])
def test_an_episode_is_shown_turn_by_turn(browser, tmp_path, tokenizer):
    from selenium.webdriver.common.keys import Keys

    long = "<script>window.__pwned = 1</script>" * 20
    said = a_conversation(
        ("policy", "ab"), ("calc", long), ("policy", "c"), turn_rewards=(0.25, None), failed_turns=(0,)
    )
    rows = [rollout("r", "q", 0, **said), rollout("r", "q", 1, response="one turn")]
    page = opened(browser, write_report([make_run(tmp_path, "r", rows, tokenizer=tokenizer)]))
    page.open(0)
    assert [e.get_attribute("data-role") for e in page.all(".turn")] == ["policy", "calc", "policy"]
    heads = page.js("return [...document.querySelectorAll('.turn > :is(p, summary)')].map((head) => head.textContent)")
    assert heads == [
        "policy turn 1, 2 tokens, reward 0.25 its call failed", f"calc turn 2, {len(long)} tokens", "policy turn 3, 1 token",
    ]  # fmt: skip
    assert page.js("return [...document.querySelectorAll('.turn pre')].map((text) => text.textContent)") == [
        "ab",
        long,
        "c",
    ]
    colors = page.js(
        "return [...document.querySelectorAll('.turn')].map((turn) => getComputedStyle(turn).borderLeftColor)"
    )
    assert colors[0] == colors[2] != colors[1]
    assert not page.one("details.turn pre").is_displayed()
    page.one("details.turn summary").send_keys(Keys.ENTER)
    assert page.one("details.turn pre").is_displayed()
    if tokenizer:
        page.all(".turn pre")[0].send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
        total = len(long) + 3
        assert page.text("output").startswith(f'Token {total} of {total} "c": probability 0.6065')
    assert len(page.all(".card .said")) == 1
    page.open(1)
    assert not page.all(".turn")
    assert page.text("pre.response") == "one turn"
    assert page.is_unharmed()


@pytest.mark.slow
def test_the_list_can_be_used_with_a_keyboard(browser, two_runs):
    from selenium.webdriver.common.keys import Keys

    page = opened(browser, two_runs)
    page.all(".list .open")[0].send_keys(Keys.ARROW_DOWN)
    page.browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    page.until(lambda: page.all("#rollout h3"))
    assert page.text("#rollout h3") == "a-0 · sample 2"
    page.until(lambda: page.js("return document.activeElement.tagName") == "H3")
    page.js("getSelection().selectAllChildren(document.querySelector('pre.prompt'))")  # to copy it
    page.all(".list .open")[3].send_keys(Keys.ENTER)
    page.until(lambda: page.text("#rollout h3") == "a-0 · sample 3")
    page.js("getSelection().selectAllChildren(document.querySelectorAll('.list tr')[1])")
    page.js("document.querySelectorAll('.list tr')[1].click()")
    assert page.text("#rollout h3") == "a-0 · sample 3", "who selects a text of the list does not open it"


@pytest.mark.slow
def test_the_detail_stands_beside_the_list_on_a_wide_screen_and_below_it_on_a_narrow_one(browser, two_runs):
    page = opened(browser, two_runs)
    sides = "const [a, b] = ['.listing', '#rollout'].map(s => document.querySelector(s).getBoundingClientRect());"
    hidden = "return [...document.querySelectorAll('.list, .list td')].some(e => e.scrollWidth > e.clientWidth + 1 && !e.matches('.clip'))"
    page.open(2)
    assert page.js(f"{sides} return a.right < b.left && Math.abs(a.top - b.top) < 20")
    assert not page.js(hidden)
    assert page.js("return document.documentElement.scrollWidth <= innerWidth")
    try:
        browser.set_window_size(800, 1000)
        page.until(lambda: page.js(f"{sides} return a.bottom < b.top"))
        assert page.js("return document.documentElement.scrollWidth <= innerWidth")
    finally:
        browser.set_window_size(1400, 1000)
    page.one("#close").click()
    assert not page.all("#rollout h3")
    assert page.js("return document.activeElement.closest('tr').rowIndex") == 3


@pytest.mark.parametrize("width", [1400, pytest.param(400, marks=pytest.mark.slow)])
def test_the_question_is_the_widest_column_on_every_screen(browser, two_runs, width):
    try:
        browser.set_window_size(width, 1000)
        page = opened(browser, two_runs)
        page.settled()
        widths = page.js("return [...document.querySelector('.list tr').cells].map((cell) => cell.clientWidth)")
        assert widths[0] == max(widths)
        assert page.js(
            "const name = document.querySelector('.list th button'); return name.scrollWidth <= name.parentElement.clientWidth"
        )
    finally:
        browser.set_window_size(1400, 1000)


@pytest.mark.slow
def test_a_row_shows_question_answer_and_reward(browser, two_runs):
    page = opened(browser, two_runs)
    page.choose("run_id", "a")
    assert page.column("example_id")[1] == "What is a-0?"
    assert page.column("extracted_answer")[:2] == ["7", "8"]
    assert page.column("reward")[:2] == ["1", "0"]


@pytest.mark.slow
def test_previous_and_next_go_over_the_pages(browser, two_runs):
    page = opened(browser, two_runs)
    page.open(24)
    here = page.text("#rollout h3")
    page.all(".moves button")[1].click()
    page.until(lambda: page.text("#rollout h3") != here)
    assert page.settled() == "26 to 50 of 78 rollouts"
    assert page.js("return document.querySelector('.list tr[aria-current]').rowIndex") == 1
    page.all(".moves button")[0].click()
    page.until(lambda: page.text("#rollout h3") == here)
    assert page.settled() == "1 to 25 of 78 rollouts"
    page.one("#page-last").click()
    page.until(lambda: page.settled() == "76 to 78 of 78 rollouts")
    page.all(".moves button")[1].click()  # from its place, and not from the page that is shown
    page.until(lambda: page.text("#rollout h3") != here)
    assert page.settled() == "26 to 50 of 78 rollouts"
    page.search("says 13")
    page.open(1)  # a-1, sample 3, step 1
    enabled = "return [...document.querySelectorAll('.moves button')].map((button) => !button.disabled)"
    assert page.js(enabled) == [True, True, True]
    page.search("step 2 says")
    assert page.js(enabled) == [False, False, True]
    assert page.text(".moves .note") == "The list has changed: this rollout has another place in it, or none."
    page.search("step 1 says")  # now the list has it at another place, among others
    assert page.text(".moves .note") == ""
    page.all(".moves button")[1].click()
    page.until(lambda: page.text("#rollout h3") != "a-1 · sample 3")
    assert page.text("#rollout h3") == "a-2 · sample 0"
    page.one("[data-sort=example_id]").click()
    page.one("[data-sort=example_id]").click()  # downwards
    page.all(".moves button")[0].click()
    page.until(lambda: page.text("#rollout h3") != "a-2 · sample 0")
    assert page.text("#rollout h3") == "a-3 · sample 3"
    page.search("step 1 says 3")
    assert page.js(enabled) == [True, False, True], "it is the last"
    page.search("step 1 says 2")
    assert page.js(enabled) == [False, False, True], "it is not in the list"


@pytest.fixture(scope="module")
def same_questions(tmp_path_factory):
    """Two runs of two steps with the same questions; of q0, run a learns one sample, and run b all."""
    root = tmp_path_factory.mktemp("same-questions")
    right = {("a", 0): 0, ("a", 1): 1, ("b", 0): 0, ("b", 1): 2}
    runs = [
        make_run(root, run, [
            rollout(run, q, s, phase="train", step=step, reward=float(s < right[run, step]), response=f"{run}{step} {q} {s}")
            for step in range(2) for q in ("q0", "q1") for s in range(2)
        ])
        for run in ("a", "b")
    ]  # fmt: skip
    return write_report(runs, root / "report.html")


@pytest.mark.slow
def test_the_same_question_at_other_steps_and_in_the_other_run_is_shown_side_by_side(browser, same_questions):
    page = opened(browser, same_questions)
    page.open(1)  # a, step 0, q0, sample 1
    assert [e.text for e in page.all(".place")] == ["0 0/2", "1 1/2", "0 0/2", "1 2/2"]
    assert [e.text for e in page.all(".places dt")] == ["a, train", "b, train"]
    assert [e.text for e in page.all(".card pre")] == ["a0 q0 0", "a0 q0 1"]
    page.all(".place")[3].click()
    page.until(lambda: page.all(".pairs"))
    assert [e.text for e in page.all(".pairs h4")] == [
        "a, train, step 0: 2 samples, 0 with a reward above 0.5",
        "b, train, step 1: 2 samples, 2 with a reward above 0.5",
    ]
    assert [e.text for e in page.all(".card pre")] == ["a0 q0 0", "b1 q0 0", "a0 q0 1", "b1 q0 1"]
    tops = page.js("return [...document.querySelectorAll('.card')].map(e => Math.round(e.getBoundingClientRect().top))")
    assert tops[0] == tops[1] < tops[2] == tops[3]
    page.all(".place")[0].click()  # its own place: the group again
    page.until(lambda: not page.all(".pairs"))
    page.all(".place")[1].click()
    page.until(lambda: page.all(".pairs"))
    page.all(".card button")[1].click()  # opens the other step's first sample
    page.until(lambda: page.text("pre.response") == "a1 q0 0")
    assert page.is_unharmed()


@pytest.mark.slow
def test_of_large_groups_the_first_samples_and_the_open_one_are_shown_at_first(browser, tmp_path):
    runs = [
        make_run(tmp_path, run, [rollout(run, "q", s, reward=float(s < 3), response=f"{run} {s}") for s in range(count)])
        for run, count in (("a", 20), ("b", 22))
    ]  # fmt: skip
    page = opened(browser, write_report(runs, tmp_path / "report.html"))
    page.open(18)  # a, sample 18
    shaded = (
        "return [...document.querySelectorAll('.card')].filter((card) => card.querySelector('[data-token]')).length"
    )
    assert page.js(shaded) < 17, "a card is shaded once it is seen"
    page.js("document.querySelector('.card:last-child').scrollIntoView()")
    page.until(lambda: page.all(".card:last-child [data-token]"))
    first = [*range(16), 18]
    assert page.text("#samples h4") == "The group: 20 samples, 3 with a reward above 0.5"
    assert [e.text for e in page.all(".card pre")] == [f"a {s}" for s in first]
    page.all(".place")[1].click()
    page.until(lambda: page.all(".pairs"))
    assert page.all(".pairs h4")[1].text == "b, eval, step 0: 22 samples, 3 with a reward above 0.5"
    assert [e.text for e in page.all(".card pre")] == [f"{run} {s}" for s in first for run in ("a", "b")]
    more = page.one("#samples > button")
    assert more.text == "the other 5 samples"
    more.click()
    assert [e.text for e in page.all(".card pre")] == [
        f"{run} {s}" for s in range(22) for run in ("a", "b") if (run, s) not in {("a", 20), ("a", 21)}
    ]
    assert not page.all("#samples > button")
    assert page.is_unharmed()


def test_without_a_tokenizer_the_page_says_why_there_is_no_shading(browser, two_runs):
    page = opened(browser, two_runs)
    page.choose("run_id", "b")
    page.open(3)
    assert page.text("pre.response") == "b3"
    assert not page.all("pre.response span")
    assert page.text("#rollout > .note") == "Not shaded: the tokenizer was not available when this page was made."


# By default every other text, on one page of the list.
@pytest.mark.parametrize(("tokenizer", "every"), [(True, 2), slow(True, 1), slow(False, 1)])
def test_hostile_rollouts_are_only_text_and_ask_for_nothing(browser, tmp_path, listener, tokenizer, every):
    url = listener.url
    hostile = [
        "<script>window.__pwned = 1</script>",
        f"</script><script src={url}/a.js></script>",
        f"<img src={url}/b.png onerror='window.__pwned = 2'>",
        f"<iframe src={url}></iframe><object data={url}></object>",
        f"<style>@import url({url}/c.css); * {{ display: none }}</style>",
        f"<link rel=stylesheet href={url}><link rel=prefetch href={url}>",
        f"<meta http-equiv=refresh content='0;url={url}'><base href={url}>",
        "<svg onload=alert(1)><a xlink:href='javascript:alert(1)'>x</a></svg>",
        "&lt;script&gt;window.__pwned = 3&lt;/script&gt; &amp; &#60;",
        "<!--<script>", "]]>", "</pre></article></main></body></html>", "<noscript><template><textarea>",
        "\x00\x07\x1b[2J\x7f\x9b \u202eright to left\u2066 \u2028\u2029\ufeff",
        "${window.__pwned = 4} {{window.__pwned = 5}} `", "__proto__", "constructor",
    ][every - 1 :: every]  # fmt: skip
    rows = [
        rollout("r", text, s, response=text, prompt=text, ground_truth=text, extracted_answer=text, failure_kind=text,
                category=text, stop_reason=text, grade_error=text, grader=text)
        for text in hostile for s in range(2)
    ]  # fmt: skip
    path = write_report([make_run(tmp_path, "r", rows, tokenizer=tokenizer, diverged=hostile[1])])
    page = opened(browser, path)
    scripts = page.js("return document.scripts.length")
    elements = set(page.js("return [...document.querySelectorAll('*')].map(e => e.localName)"))
    assert not elements & {"img", "iframe", "object", "link", "base", "embed", "template", "textarea"}
    odd = "\\x00\\x07\\x1b[2J\\x7f\\x9b \\u202eright to left\\u2066 \\u2028\\u2029\\ufeff"
    shown = []
    # One of each two; a second page begins with the 26th.
    for places in (range(0, 25, 2), range(1, 9, 2)) if every == 1 else (range(0, len(rows), 2),):
        for place in places:
            page.open(place)
            shown.append(page.text("pre.response"))
            assert page.text("pre.prompt") == shown[-1]
            assert [e.get_attribute("textContent") for e in page.all(".card pre")] == shown[-1:] * 2
            assert bool(page.all("pre.response [data-token]")) == tokenizer
        if every == 1:
            page.one("#page-next").click()
            page.settled()
    assert sorted(shown) == sorted(text if text.isprintable() else odd for text in hostile)
    assert page.search(hostile[0]).startswith("1 to 2 of 2 ")
    assert page.js("return document.scripts.length") == scripts
    assert page.is_unharmed()
    assert [u for u in page.requests() if not u.startswith("data:")] == [path.as_uri()]
    assert not browser.get_log("browser")
    assert listener.connections == 0


def test_the_policy_stops_what_would_get_past_everything_else(browser, two_runs, listener):
    page = opened(browser, two_runs)
    url = listener.url
    page.js("document.body.append(Object.assign(new Image(), {src: arguments[0]}))", url)
    assert (
        page.js("try { document.body.innerHTML = '<b>'; return 'parsed' } catch (e) { return e.name }") == "TypeError"
    )
    made = "const s = document.createElement('script');"
    assert (
        page.js(f"try {{ {made} s.textContent = 'window.__pwned = 1'; return 'set' }} catch (e) {{ return e.name }}")
        == "TypeError"
    )
    page.js("return fetch(arguments[0]).catch(() => null)", url)
    page.until(lambda: len(page.js("return window.__violations")) >= 2)
    violations = " ".join(page.js("return window.__violations"))
    assert "img-src" in violations
    assert "connect-src" in violations
    assert listener.connections == 0
    with socket.create_connection(listener.socket.getsockname()):  # it would have been counted
        page.until(lambda: listener.connections == 1)
    assert page.js("return window.__pwned === undefined")
    browser.get_log("browser")


@pytest.mark.slow
def test_fifty_thousand_rollouts_are_a_list_like_any_other(browser, tmp_path):
    rows = [
        rollout("r", f"q{i}", s, phase="train", step=step, response=f"{step} {i}", reward=float(s == 0))
        for step in range(25) for i in range(250) for s in range(8)
    ]  # fmt: skip
    page = opened(browser, write_report([make_run(tmp_path, "r", rows)]))
    assert page.settled() == "1 to 25 of 50,000 rollouts"
    assert page.js("return document.querySelectorAll('*').length") < 2000
    assert page.choose("step", "17") == "1 to 25 of 2,000 rollouts (of 50,000 in this page)"
    assert page.choose("reward", "above 0.5") == "1 to 25 of 250 rollouts (of 50,000 in this page)"
    page.one("#reset").click()
    assert page.search("24 249") == "1 to 8 of 8 rollouts (of 50,000 in this page)"
    page.open(7)
    assert len(page.all(".card")) == 8
