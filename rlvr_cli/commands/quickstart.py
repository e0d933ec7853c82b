"""`rlvr quickstart`: train a tiny model to reason, on a CPU.

Enters: a QuickstartConfig. Leaves: the runs of the commands that it ran, with the untrained model and a picture of the curves
in them, and a table of rewards.

Every step is a command that can also be typed, and runs as a process of its own.
"""

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rlvr_cli.analysis.statistics.estimators import share_interval
from rlvr_cli.config.quickstart import QuickstartConfig
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.process import STOP_SIGNALS
from rlvr_cli.runs.readers import RUN_NAME, read_rollouts
from rlvr_cli.runs.storage.files import os_errors_as_user_errors
from rlvr_cli.terminal import console, tables

SHOWN = re.compile(r"evaluation +after|updates: |steps: |sampling: |note: ")  # lines of a command's stderr to show
PICTURE = "curves.png"  # in the run of GRPO
STAGES = {"untrained": "start-eval", "after SFT": "sft-eval", "after GRPO": "grpo-eval"}
WITHOUT_TOOL = {"without the tool": "without-eval"}


def run(config: QuickstartConfig) -> None:
    """Run the commands one after the other. Raises RlvrError when one fails, Interrupted after a signal."""
    name = config.name or f"quickstart-{time.strftime('%Y%m%d-%H%M%S')}"
    runs = Path(config.runs_dir)
    stages = STAGES | (WITHOUT_TOOL if config.tools else {})
    if RUN_NAME.fullmatch(f"{name}-{max(stages.values(), key=len)}") is None:
        raise RlvrError(
            f"{name!r} cannot be the name of the runs.",
            "Use at most 100 of the characters A-Z a-z 0-9 . _ - and start with a letter or digit.",
        )
    with os_errors_as_user_errors(runs):
        runs.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for title, command in commands(name, runs, seed=config.seed, tools=config.tools):
        console.say(f"\n# {title}\n$ {shlex.join(command)}")
        run_command(command)
    console.say(f"\ncurves         {runs / f'{name}-grpo' / PICTURE}")
    rows = []
    for stage, suffix in stages.items():
        table = read_rollouts(runs / f"{name}-{suffix}", columns=["reward", "format_reward", "num_response_tokens"])
        rewards, formats, lengths = (table[column].to_pylist() for column in table.column_names)
        correct, n = sum(reward or 0 for reward in rewards), len(rewards)
        low, high = share_interval(correct / n, n)
        rows.append((stage, correct / n, low, high, sum(f or 0 for f in formats) / n, sum(lengths) / n))
    tables.print_table(("model", "held_out_reward", "low", "high", "format_reward", "mean_tokens"), rows)
    rise = rows[2][1] - rows[1][1]
    console.say(
        f"GRPO changed the held-out reward by {rise:+.2f}. All steps together took {time.monotonic() - started:.0f} s."
    )
    console.say(
        f"next           rlvr analyze {'turns' if config.tools else 'failures'} {runs / f'{name}-grpo'}    (rlvr analyze --list names other queries)"
    )


def commands(name: str, runs: Path, *, seed: int, tools: bool = False) -> list[tuple[str, list[str]]]:
    """The commands of the quickstart: a title and a command line each.

    Args:
        tools: whether its episodes have a calculator.
    """

    def model_of(run: str) -> str:
        return str(runs / f"{name}-{run}" / "model")

    start = model_of("start")
    picture = runs / f"{name}-grpo" / PICTURE
    where = ["--runs-dir", str(runs)] if str(runs) != "runs" else []

    preset, task = ("quickstart-tools", "multiplication") if tools else ("quickstart", "arithmetic")
    sizes = (6000, 6000) if tools else (8000, 4000)

    def rlvr(command: str, run: str, *given: str, model: str, dataset: str = "") -> list[str]:
        options = ["--preset", preset, "--model", model, *(["--dataset", dataset] if dataset else []), *given]
        return ["rlvr", command, *options, "--seed", str(seed), "--run", f"{name}-{run}", *where]

    def traces(size: int, offset: int) -> str:
        return f"{task}:{size}:{seed + offset}"

    make = ["python", "-m", "rlvr_cli.models.tiny", str(runs / f"{name}-start"), "--as-run", "--seed", str(seed)]
    make += ["--dataset", task] if tools else []
    taken_away = (
        "evaluate it with the calculator taken away",
        rlvr("eval", "without-eval", "--environment", "", model=model_of("grpo")),
    )
    draw = ["rlvr", "analyze", "curves", f"{name}-grpo", *where, "--plot", str(picture)]
    return [
        ("a tokenizer and an untrained model of 0.4M parameters", make),
        ("evaluate the untrained model: it solves nothing", rlvr("eval", "start-eval", model=start)),
        (
            f"fine-tune on traces: a third of them {'ask the calculator' if tools else 'work the problem out'}, the rest guess",
            rlvr("sft", "sft", model=start, dataset=traces(sizes[0], 0)),
        ),
        ("evaluate the fine-tuned model", rlvr("eval", "sft-eval", model=model_of("sft"))),
        (
            f"reinforce correct responses (GRPO), on {'questions in another order' if tools else 'other questions'}",
            rlvr("grpo", "grpo", model=model_of("sft"), dataset=traces(sizes[1], 1000)),
        ),
        ("evaluate the model after GRPO", rlvr("eval", "grpo-eval", model=model_of("grpo"))),
        *([taken_away] if tools else []),
        ("draw the curves", draw),
    ]


def run_command(command: Sequence[str]) -> None:
    """Run a command and show its progress."""
    program = {"rlvr": [sys.executable, "-m", "rlvr_cli"], "python": [sys.executable]}[command[0]]
    with forwarding_signals(
        subprocess.Popen([*program, *command[1:]], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    ) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if SHOWN.match(line) and "every" not in line:
                console.say(line.rstrip())
        status = process.wait()
    if status:
        raise RlvrError(f"{shlex.join(command)} ended with status {status}:\n{''.join(said[-8:]).rstrip()}")


@contextmanager
def forwarding_signals(process: "subprocess.Popen[str]") -> Iterator["subprocess.Popen[str]"]:
    """On Ctrl-C wait for the command, which has received the signal too, to save; pass the other signals on first.

    Raises:
        Interrupted: after any of `STOP_SIGNALS`, once the command has ended.
    """

    passed_on = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal passed_on
        process.terminate()
        if not passed_on:  # else the command is being waited for
            passed_on = True
            raise KeyboardInterrupt

    others = [n for n in STOP_SIGNALS if n != signal.SIGINT and signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, pass_on) for number in others}
    try:
        yield process
    except KeyboardInterrupt:
        process.wait()
        raise Interrupted("the runs so far are kept") from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
