"""The options of `rlvr discover`."""

from dataclasses import dataclass
from typing import Literal

from rlvr_cli.config.parsing.options import LONGEST, check_effects, check_values, flag, knob
from rlvr_cli.config.parsing.sources import is_partial
from rlvr_cli.config.shared.endpoint import EndpointOptions, check_endpoint
from rlvr_cli.config.shared.engine import check_engine, check_servers
from rlvr_cli.config.shared.run import RunOptions
from rlvr_cli.config.shared.sampling import SamplingOptions, check_sampling
from rlvr_cli.errors import RlvrError

Proposer = Literal["model", "mutate", "replay"]
Strategy = Literal["best-of-n", "refine", "islands"]
KISSING = "kissing"  # the task that comes with rlvr
DIM = 11  # of the homework


@dataclass(frozen=True)
class DiscoverConfig(RunOptions, SamplingOptions, EndpointOptions):
    """Search for programs with a verifier: a model writes them, each runs in a sandbox, what it gives is verified, and the next prompts
    build on that.

    Examples:
        rlvr discover kissing --dim 11 --model Qwen/Qwen3-32B --base-url http://localhost:8000/v1 --rounds 20 --num-samples 8
        rlvr discover kissing --dim 11 --proposer mutate --max-attempts 60 --run k11
        rlvr discover --verify program.py --dim 11
    """

    task: str = knob(
        KISSING,
        "kissing, or a directory with prompt.md, program.py and a trusted verify.py. Default: kissing.",
        group="Data",
        argument=True,
        path=True,
    )
    dim: int = knob(DIM, "Dimension of the kissing number.", group="Data", common=True, at_least=1, at_most=64)
    start: str = knob("", "File with the program to start from. Empty: the task's own.", group="Data", path=True)
    verify: str = knob(
        "", "Only run this program and verify what it gives: JSON, and exit status 1 if that is not valid.",
        group="Data", common=True, free_on_resume=True,
        path=True,
    )  # fmt: skip
    proposer: Proposer = knob(
        "model",
        "Who writes programs: a model; mutate, which changes a parameter of the program; or replay, which reads them from --replay-from.",
        group="Model",
        common=True,
    )
    replay_from: str = knob(
        "",
        'File with the responses for --proposer replay: JSONL, a line {"response": "..."} each; or JSON, CSV, Parquet.',
        group="Model",
        path=True,
    )
    chat: bool = knob(
        False, "Send the prompt as the user's message, in the model's own chat template.", group="Model", common=True
    )
    endpoint: Literal["completions", "chat"] = knob(
        "chat", "Endpoint's API: chat, or completions (raw prompt).", group="Model"
    )
    sampling_max_tokens: int = knob(
        4096, "Maximum response length in tokens.", group="Sampling", common=True, at_least=1
    )
    stop: tuple[str, ...] = knob(
        (),
        "Stop string: ends a response and is kept in it, but not within its first --sampling-min-tokens tokens; repeatable; '' for none.",
        group="Sampling",
    )
    strategy: Strategy = knob(
        "refine",
        "What prompts show. best-of-n: the task alone; refine: the slot's last program with its error, or the best one; "
        "islands: programs of one of several populations.",
        group="Algorithm",
        common=True,
    )
    rounds: int = knob(
        20, "Rounds; the prompts of a round show attempts of earlier rounds.", group="Algorithm", common=True, free_on_resume=True, at_least=1,
    )  # fmt: skip
    num_samples: int = knob(8, "Attempts per round.", group="Algorithm", common=True, at_least=1)
    parents: int = knob(2, "Programs that a prompt of --strategy islands shows.", group="Algorithm", at_least=1)
    islands: int = knob(4, "Populations of --strategy islands.", group="Algorithm", at_least=1)
    max_attempts: int | None = knob(
        None, "Stop after this many attempts.", group="Algorithm", common=True, free_on_resume=True, at_least=1
    )
    max_tokens: int | None = knob(
        None, "Begin no round after prompts and responses have this many tokens; 0: no limit.", group="Algorithm", common=True, free_on_resume=True,
        at_least=0,
    )  # fmt: skip
    target: float | None = knob(
        None,
        "Begin no round once an attempt, or the program to start from, has this score.",
        group="Algorithm",
        common=True,
        free_on_resume=True,
    )
    concurrency: int = knob(2, "Programs that run at once.", group="Grading", free_on_resume=True, at_least=1)
    program_timeout: float = knob(
        10.0,
        "Seconds that a program may take; it is then killed.",
        group="Grading",
        common=True,
        above=0,
        at_most=LONGEST,
    )
    program_memory_gb: float = knob(2.0, "Memory that a program may use, GiB.", group="Grading", above=0, at_most=1024)
    require_sandbox: bool = knob(
        False, "Refuse to run programs where a layer of the sandbox is missing.", group="Grading", common=True
    )
    dry_run: bool = knob(False, "Print the plan and stop.", group="Run", common=True, free_on_resume=True)

    def __post_init__(self) -> None:
        if is_partial(self):
            return
        check_values(self)
        check_sampling(self)
        check_engine(self)
        check_servers(self)
        check_endpoint(self, chat=self.chat)
        if self.verify and self.dry_run:
            raise RlvrError("--dry-run has no effect with --verify: one program runs.", "Leave one of them out.")
        if self.dim != DIM and self.task not in ("", KISSING):
            raise RlvrError(f"--dim is of the kissing number; {self.task} is a task of your own.", "Leave --dim out.")
        if bool(self.replay_from) != (self.proposer == "replay"):
            raise RlvrError(
                "--proposer replay and --replay-from FILE belong together.", "Give both of them, or leave both out."
            )
        self._check_effects()

    def _check_effects(self) -> None:
        """Raise RlvrError for an option of the command line that the others leave without effect."""
        given = [name for name in ("model", "base_url", "sampler_urls", "chat") if getattr(self, name)]
        given += ["max_tokens"] if self.sources.get("max_tokens") == "flag" else []
        if self.proposer != "model" and given:
            raise RlvrError(
                f"{flag(given[0])} has no effect with --proposer {self.proposer}: no model is asked.",
                "Leave one of them out.",
            )
        check_effects(self, dict.fromkeys(("parents", "islands"), (self.strategy == "islands", "--strategy islands")))
