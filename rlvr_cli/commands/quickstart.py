"""`rlvr quickstart`: train a tiny model to reason, on a CPU.

Enters: a QuickstartConfig. Leaves: the runs of the commands that it ran, with the untrained model and a picture of the curves
in them, and a table of rewards.

Every step is a command that can also be typed, and runs as a process of its own.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlvr_cli.analysis.statistics.estimators import share_interval
from rlvr_cli.config.parsing.command_line import typed_options, words_of
from rlvr_cli.config.parsing.sources import environment_values
from rlvr_cli.config.quickstart import QuickstartConfig
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.process import forwarding_signals
from rlvr_cli.rollouts.metrics import AVERAGED, generation_metrics
from rlvr_cli.runs.manifest import RUN_FILE, RUN_NAME
from rlvr_cli.runs.readers import ENDED, read_metadata, read_rollouts
from rlvr_cli.runs.remote.store import is_address
from rlvr_cli.runs.remote.work import Mirror
from rlvr_cli.runs.storage.files import os_errors_as_user_errors, shown, typed
from rlvr_cli.terminal import console, tables

SHOWN = re.compile(r"evaluation +after|updates: |steps: |sampling: |note: ")  # lines of a command's stderr to show
PICTURE = "curves.png"  # in the run of GRPO
STAGES = {"untrained": "start-eval", "after SFT": "sft-eval", "after GRPO": "grpo-eval"}


@dataclass(frozen=True)
class Task:
    """What is learned.

    Attributes:
        preset, dataset: their names.
        traces, questions: how many examples SFT and GRPO have.
        a_third: what a third of the traces do.
        new: how GRPO's questions differ from those of SFT.
        query: the named query to look at next.
        tool: whether there is one, which is taken away in the end.
    """

    preset: str
    dataset: str
    traces: int
    questions: int
    a_third: str
    new: str
    query: str
    tool: bool = False

    @property
    def stages(self) -> dict[str, str]:
        """The rows of the table at the end -> the ends of their runs' names."""
        return STAGES | ({"without the tool": "without-eval"} if self.tool else {})


REASONING = Task(
    "quickstart", "arithmetic", 8000, 4000, "work the problem out", new="other questions", query="failures"
)
TOOLS = Task(
    "quickstart-tools", "multiplication", 6000, 6000, "ask the calculator", "reordered questions", "turns", tool=True
)


def run(config: QuickstartConfig) -> None:
    """Run what is left of the commands, one after the other. Raises RlvrError when one fails, Interrupted after a signal."""
    name = config.name or f"quickstart-{time.strftime('%Y%m%d-%H%M%S')}"
    mirror = Mirror(config.runs_dir) if is_address(config.runs_dir) else None
    runs = mirror.folder if mirror else Path(config.runs_dir)
    task = TOOLS if config.tools else REASONING
    if RUN_NAME.fullmatch(f"{name}-{max(task.stages.values(), key=len)}") is None:
        raise RlvrError(
            f"{name!r} cannot be the name of the runs.",
            "Use at most 100 of the characters A-Z a-z 0-9 . _ - and start with a letter or digit.",
        )
    with os_errors_as_user_errors(runs):
        runs.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    if mirror:
        wanted = [f"{name}-{run}" for run in ("start", "sft", "grpo", *task.stages.values())]
        for run in mirror.bring(wanted, left_out=(failed := {})):
            if not (runs / run).exists():
                raise RlvrError(f"{run} has not ended in {config.runs_dir}, and is not here.", "Choose another --name.")
        for problem in failed.values():
            raise problem
    planned = commands(name, runs, seed=config.seed, task=task)
    steps = [(title, left_of(command, runs)) for title, command in planned]
    again = shlex.join(["rlvr", "quickstart", *words_of(QuickstartConfig, {**typed_options(config), "name": name})])
    try:
        for title, command in steps:
            console.say(f"\n# {title}\n{f'$ {shlex.join(command)}' if command else 'finished before'}")
            if command:
                run_command(command)
        if mirror:
            for run in sorted(runs.glob(f"{name}-*/{RUN_FILE}")):
                mirror.send(run.parent.name)
    except (Interrupted, KeyboardInterrupt):
        raise Interrupted(f"the runs so far are kept; go on with: {again}") from None
    except RlvrError as error:
        raise RlvrError(error.problem, f"Once that is mended, go on with: {again}") from error
    console.say(f"\ncurves         {runs / f'{name}-grpo' / PICTURE}")
    rows = []
    for stage, suffix in task.stages.items():
        averages = generation_metrics(read_rollouts(runs / f"{name}-{suffix}", columns=[*AVERAGED]).to_pylist())
        n = round(averages["reward/samples"])
        low, high = share_interval(averages["reward/mean"], n)
        rows.append((stage, averages["reward/mean"], low, high, averages["reward/format"], averages["length/mean"]))
    tables.print_table(("model", "held_out_reward", "low", "high", "format_reward", "mean_tokens"), rows)
    took = f"{'All steps together' if steps == planned else 'The rest'} took {time.monotonic() - started:.0f} s."
    console.say(f"GRPO changed the held-out reward by {rows[2][1] - rows[1][1]:+.2f}. {took}")
    console.say(
        f"next           rlvr analyze {task.query} {typed(runs / f'{name}-grpo')}    (rlvr analyze --list names other queries)"
    )


def commands(name: str, runs: Path, *, seed: int, task: Task = REASONING) -> list[tuple[str, list[str]]]:
    """The commands of the quickstart: a title and a command line each."""

    def model_of(run: str) -> str:
        return str(runs / f"{name}-{run}" / "model")

    start = model_of("start")
    picture = runs / f"{name}-grpo" / PICTURE
    where = [] if str(runs) == "runs" and "runs_dir" not in environment_values() else ["--runs-dir", str(runs)]

    def rlvr(command: str, run: str, *given: str, model: str, dataset: str = "") -> list[str]:
        options = ["--preset", task.preset, "--model", model, *(["--dataset", dataset] if dataset else []), *given]
        return ["rlvr", command, *options, "--seed", str(seed), "--run", f"{name}-{run}", *where]

    def traces(size: int, offset: int) -> str:
        return f"{task.dataset}:{size}:{seed + offset}"

    make = ["python", "-m", "rlvr_cli.models.tiny", str(runs / f"{name}-start"), "--as-run", "--seed", str(seed)]
    make += ["--dataset", task.dataset] if task is not REASONING else []
    taken_away = (
        "evaluate it with the calculator taken away",
        rlvr("eval", "without-eval", "--environment", "", model=model_of("grpo")),
    )
    draw = ["rlvr", "analyze", "curves", f"{name}-grpo", *where, "--plot", str(picture)]
    return [
        ("a tokenizer and an untrained model of 0.4M parameters", make),
        ("evaluate the untrained model: it solves nothing", rlvr("eval", "start-eval", model=start)),
        (
            f"fine-tune on traces: a third of them {task.a_third}, the rest guess",
            rlvr("sft", "sft", model=start, dataset=traces(task.traces, 0)),
        ),
        ("evaluate the fine-tuned model", rlvr("eval", "sft-eval", model=model_of("sft"))),
        (
            f"reinforce correct responses (GRPO), on {task.new}",
            rlvr("grpo", "grpo", model=model_of("sft"), dataset=traces(task.questions, 1000)),
        ),
        ("evaluate the model after GRPO", rlvr("eval", "grpo-eval", model=model_of("grpo"))),
        *([taken_away] if task.tool else []),
        ("draw the curves", draw),
    ]


def left_of(command: list[str], runs: Path) -> list[str]:
    """The command that does the rest of this one's run, if any is left. Raises RlvrError if another one made the run."""
    is_rlvr = command[0] == "rlvr"
    words = command[1:] if is_rlvr else command[3:]
    run = runs / words[words.index("--run") + 1] if "--run" in words else Path(words[0])
    if words[0] == "analyze" or not os.path.lexists(run):
        return command
    metadata = read_metadata(run)
    if metadata.get("environment", {}).get("argv", [])[1:] != words:
        raise RlvrError(
            f"{shown(run)} exists already, and was made by another command, or elsewhere.", "Choose another --name."
        )
    if metadata["status"] in ENDED:
        return []
    return [*command[:2], "--resume", run.name, "--runs-dir", str(runs)] if is_rlvr else command


def run_command(command: Sequence[str]) -> None:
    """Run a command and show its progress."""
    program = {"rlvr": [sys.executable, "-m", "rlvr_cli"], "python": [sys.executable]}[command[0]]
    with forwarding_signals(
        subprocess.Popen([*program, *command[1:]], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    ) as process:
        assert process.stderr is not None
        said = []
        with process.stderr:
            for line in process.stderr:
                said.append(line)
                if SHOWN.match(line) and "every" not in line:
                    console.say(line.rstrip())
        status = process.wait()
    if status:
        raise RlvrError(f"{shlex.join(command)} ended with status {status}:\n{''.join(said[-8:]).rstrip()}")
