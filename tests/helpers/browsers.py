"""A real browser for the tests of pages: Chromium with its driver, through selenium."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMEDRIVER = shutil.which("chromedriver")
NEEDED = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason="there is no chromium with its chromedriver"),
]
WATCH = """
window.__violations = [];
document.addEventListener("securitypolicyviolation", (e) => window.__violations.push(e.violatedDirective + " " + e.blockedURI));
window.alert = () => { window.__pwned = "alert"; };
"""


@contextmanager
def chromium() -> Iterator[Any]:
    """Start a browser that notes what a page's policy stops."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """A report, of a file or of a server, that is open in the browser."""

    def __init__(self, browser, url: str) -> None:
        self.browser = browser
        browser.get_log("performance")
        browser.get(url)
        self.settled()

    def js(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def one(self, selector):
        (found,) = self.all(selector)
        return found

    def until(self, holds):
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.browser, 30, poll_frequency=0.1).until(lambda _: holds())

    def settled(self) -> str:
        """The status line, once no other list is on its way."""
        # No status line either, while the page still unpacks its rollouts: that goes on after the browser's load event.
        self.until(lambda: self.all(".listing[aria-busy=false]") and "rollouts" in self.text(".status"))
        return self.text(".status")

    def choose(self, name, text) -> str:
        from selenium.webdriver.support.ui import Select

        Select(self.one(f"#filter-{name}")).select_by_visible_text(text)
        return self.settled()

    def search(self, text) -> str:
        self.one("#search").clear()
        self.one("#search").send_keys(text)
        return self.settled()

    def column(self, name) -> list[str]:
        return self.js(
            "return [...document.querySelectorAll('.list tbody .col-' + arguments[0])].map(cell => cell.textContent)",
            name,
        )

    def questions(self) -> list[str]:
        """The ids in the questions `What is ID?`."""
        return [text.removeprefix("What is ").removesuffix("?") for text in self.column("example_id")]

    def open(self, place) -> None:
        """Click the row at this place of the list, and wait until its rollout is shown."""
        row = self.all(".list tbody tr")[place]
        key = row.get_attribute("data-key")
        row.find_element("css selector", "button").click()
        self.until(lambda: self.js("return document.querySelector('#rollout').dataset.key") == key)

    def text(self, selector) -> str:
        return self.js("return document.querySelector(arguments[0]).textContent", selector)

    def requests(self) -> list[str]:
        """What the browser asked for since the page was opened."""
        events = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def is_unharmed(self) -> bool:
        return self.js(
            "return window.__pwned === undefined && window.__violations.length === 0"
            " && document.querySelectorAll('img, iframe, base, object, embed, #browser script, #browser style').length === 0"
        )
