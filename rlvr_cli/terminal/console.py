"""Messages and progress on stderr, text on stdout. Only the modules of this room import rich.

Enters: any text, even hostile: a response can contain escape sequences, markup or an endless line. Leaves: text in
which every control character except newline and tab is escaped (`text.printable`); our own ANSI codes go to terminals
only, never into a pipe.
"""

import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from rlvr_cli.text import printable, redacted

if TYPE_CHECKING:
    from rich.console import Console

LOG_SECONDS = 5.0  # between two progress lines when stderr is not a terminal
BAR_RATE = 2  # redraws of the bar per second: each costs the work milliseconds


def say(text: str) -> None:
    """Print a message for the user on stderr, without secrets."""
    write_text(sys.stderr, printable(redacted(text)) + "\n")


def report_skipped_lines(count: int, reasons: Sequence[str]) -> None:
    """Report on stderr how many lines of a data file were skipped, and the reasons for the first ones."""
    if count:
        say(f"skipped {count} bad line{'s' if count > 1 else ''}:")
        for reason in reasons:
            say(f"  {reason}")


def report_passed_over(names: Sequence[str]) -> None:
    """Say on stderr what a pattern of runs matches besides runs."""
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        say(f"passed over, since no run: {', '.join(names[:5])}{more}")


def print_text(text: str) -> None:
    """Print a text on stdout unformatted, with control characters escaped."""
    write_text(sys.stdout, printable(text).rstrip("\n") + "\n")


def print_page(page: str) -> None:
    """Print a page of `help` on stdout."""
    write_text(sys.stdout, page.rstrip("\n") + "\n")


class Progress:
    """The state of running work; made by `progress`."""

    def __init__(self, total: int, *, running_mean: bool, done: int = 0) -> None:
        self.total = total
        self.done = self._done_before = done
        self._running_mean = running_mean
        self._sums: dict[str, tuple[float, int]] = {}
        self._tokens = 0.0
        self._started = time.monotonic()
        self._show: Callable[[], None] = lambda: None

    def advance(self, n: int, **signals: float) -> None:
        """Record that n more items are done.

        Args:
            signals: means over these n items, shown as means over all items so far, or as given with
                ``running_mean=False``; `tokens` is a count, shown as tokens per second.
        """
        self.done += n
        self._tokens += signals.pop("tokens", 0.0)
        for name, value in signals.items():
            total, count = self._sums.get(name, (0.0, 0)) if self._running_mean else (0.0, 0)
            self._sums[name] = total + value * n, count + n
        self._show()

    def signals(self) -> dict[str, str]:
        """Return the values shown beside the bar, formatted, by name."""
        shown = {name: f"{total / count:.4g}" for name, (total, count) in self._sums.items() if count}
        seconds = time.monotonic() - self._started
        if self._tokens and seconds > 0:
            shown["tokens/s"] = f"{self._tokens / seconds:,.0f}"
        return shown

    def line(self, description: str) -> str:
        """Return the state as one log line."""
        seconds = time.monotonic() - self._started
        rate = (self.done - self._done_before) / seconds if seconds > 0 else 0.0
        left = duration((self.total - self.done) / rate) if rate else "?"
        share = f" ({self.done / self.total:.0%})" if self.total else ""
        pace = [f"{rate:.3g}/s", f"{left} left"] if rate or self.done < self.total else []
        parts = [f"{self.done}/{self.total}{share}", *pace]
        return f"{description}: " + ", ".join(parts + [f"{k} {v}" for k, v in self.signals().items()])


@contextmanager
def progress(description: str, total: int, *, done: int = 0, running_mean: bool = True) -> Iterator[Progress]:
    """Show progress on stderr: a bar with rate, time left and signals on a terminal, else a line every few seconds.

    Args:
        done: items of `total` that were done before, such as those of a run that resumes.
    """
    state = Progress(total, running_mean=running_mean, done=done)
    with _bar(description, state) if sys.stderr.isatty() else _log_lines(description, state):
        yield state


@contextmanager
def _log_lines(description: str, state: Progress) -> Iterator[None]:
    shown_at, shown = time.monotonic(), -1

    def show() -> None:
        nonlocal shown_at, shown
        now = time.monotonic()
        if now - shown_at >= LOG_SECONDS or state.done >= state.total > shown:
            shown_at, shown = now, state.done
            say(one_line(state.line(description)))

    state._show = show
    yield
    if shown != state.done:
        say(one_line(state.line(description)))


@contextmanager
def _bar(description: str, state: Progress) -> Iterator[None]:
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class Signals(ProgressColumn):
        def render(self, task: Task) -> Text:
            rate = f"{task.speed:.3g}/s" if task.speed else ""
            return Text(one_line("  ".join([rate, *(f"{k} {v}" for k, v in state.signals().items())])))

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        Signals(),
    )
    console = rich_console(sys.stderr)
    with RichProgress(*columns, console=console, redirect_stdout=False, refresh_per_second=BAR_RATE) as bars:
        task = bars.add_task(one_line(description), total=state.total, completed=state.done)
        state._show = lambda: bars.update(task, completed=state.done)
        yield


def rich_console(stream: TextIO) -> "Console":
    """Return a rich console for a terminal that interprets no markup, emoji codes or highlighting in the text."""
    from rich.console import Console

    return Console(
        file=_tolerant(stream),
        force_terminal=True,
        force_jupyter=False,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
    )


def write_text(stream: TextIO, text: str) -> None:
    _tolerant(stream).write(text)
    stream.flush()


def _tolerant(stream: TextIO) -> TextIO:
    """Return the stream, set to escape characters that its encoding cannot represent."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


def shortened(text: str, limit: int) -> str:
    """Return a text longer than `limit` as its beginning and end with the number of characters left out, if that is shorter."""
    if len(text) <= limit:
        return text
    kept = limit // 2
    short = f"{text[:kept]} … [{len(text) - 2 * kept:,} characters left out] … {text[-kept:]}"
    return min(short, text, key=len)


def one_line(text: str) -> str:
    return printable(text.replace("\n", "\\n").replace("\t", "\\t"), keep="")


def duration(seconds: float) -> str:
    """Return seconds in words, such as 2 min 05 s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
