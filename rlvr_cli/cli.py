"""The command line: config dataclasses become Typer commands, each built, and its code imported, only when it is called.

Enters: argv. Leaves: exit status 0; 2, a usage error: an unknown command, option or choice, a value out of range, options
that exclude each other, wherever they are given (flag, preset, --config file); 1, any other error that the user can fix, such
as a file or a run that is not there; or 130 (interrupted by Ctrl-C, SIGTERM, SIGHUP or SIGUSR1; finished work is kept).
"""

import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import Field
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from rlvr_cli import __version__, process
from rlvr_cli.completion import complete_value
from rlvr_cli.config import config_of, module_of
from rlvr_cli.config.parsing.options import (
    combined,
    flag,
    nearest,
    options,
    read_value,
    summary_and_examples,
    value_type,
)
from rlvr_cli.config.parsing.sources import preset_names, resolve
from rlvr_cli.config.parsing.synonyms import suggested_options
from rlvr_cli.errors import Interrupted, RlvrError, UsageError, short_of_resources
from rlvr_cli.terminal import help, streams
from rlvr_cli.text import printable, redacted

COMMANDS = {
    "quickstart": "See reward rise.",
    "eval": "Evaluate a model.",
    "sft": "Fine-tune on reasoning traces.",
    "dpo": "Preference optimization on pairs of responses.",
    "ei": "Expert iteration.",
    "grpo": "Policy gradient on groups of graded responses.",
    "ppo": "Policy gradient with a critic.",
    "distill": "On-policy distillation.",
    "discover": "Search for programs with a verifier.",
    "sweep": "Run an experiment: runs that differ in an option, with several seeds.",
    "grade": "Regrade a run with another grader.",
    "pairwise": "Compare the responses of two runs by a judge.",
    "filter": "Make a dataset from a run's rollouts or another dataset.",
    "runs": "List the runs.",
    "analyze": "Analyze runs with SQL, named queries or an HTML report.",
    "view": "Show runs in a browser while they run.",
    "export": "Send runs to W&B, TensorBoard, Trackio or object storage, or write CSV.",
    "fetch": "Get runs from object storage, to read or to resume them here.",
    "check": "Verify a run: every file against its sha256.",
    "doctor": "Say whether this machine can do what rlvr does.",
}
PAIRWISE = "--pairwise"  # `rlvr eval --pairwise` is `rlvr pairwise`
PASSING_ON = ("sweep",)  # commands whose words may be options of another one
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
COMPLETE = "_RLVR_COMPLETE"  # environment variable that a shell's completion script sets (Typer's protocol)
MOVED = {
    "report": "analyze report",
    "plot": "analyze curves RUN --plot FILE.png",
    "list": "runs",
    "ls": "runs",
    "train": "grpo, or rlvr sft, ei, dpo, ppo",
}


class _Reader:
    """Reads what is given for a parameter. Typer's own way begins with the import of pydantic: 0.1 s of CPU.

    Args:
        parse: reads a value; None: there is nothing to read, as of a flag.
    """

    def __init__(self, parse: Callable[[str], Any] | None) -> None:
        self._parse = parse

    def coerce(self, value: Any, *, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if self._parse is None:
            return value
        return [*map(self._parse, value)] if isinstance(value, (list, tuple)) else self._parse(value)


def _with_readers(parameters: list[Any]) -> list[Any]:
    """Give each parameter its `_Reader`, in the place where Typer keeps its own. The range of versions in pyproject.toml has this place."""
    for parameter in parameters:
        parameter._runtime_param = _Reader(parameter.type_descriptor.parameter_info.parser)
    return parameters


class Command(TyperCommand):
    """A command with a short help (``--help``) and a full one (``--help-all``)."""

    def get_params(self, ctx: typer.Context) -> list[Any]:
        return _with_readers(super().get_params(ctx))

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        assert self.name is not None
        formatter.write(command_help(self.name, self.get_usage(ctx), every="help_all" in ctx.meta))

    def shell_complete(self, ctx: typer.Context, incomplete: str) -> list[Any]:
        found = super().shell_complete(ctx, incomplete)
        for item in found:
            item.help = _brief(item.help or "")
        return found


class Commands(TyperGroup):
    """The command group; a command is built only when it is called."""

    def get_params(self, ctx: typer.Context) -> list[Any]:
        return _with_readers(super().get_params(ctx))

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand | None:
        """Return a stub with the command's name and one-line help; `resolve_command` builds the real command."""
        return TyperCommand(cmd_name, short_help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, *rest = args
        if name == "eval" and PAIRWISE in rest:
            name, rest = "pairwise", [word for word in rest if word != PAIRWISE]
        if name in COMMANDS:
            return name, build(name), rest
        if ctx.resilient_parsing:
            return None, None, rest
        raise unknown_command(name)

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        panels = {
            "Commands": [help.Row((name,), line) for name, line in COMMANDS.items()],
            "Options": [
                help.Row((", ".join(sorted(p.opts, key=len)),), getattr(p, "help", "") or "")
                for p in self.get_params(ctx)
            ],
        }
        footer = ["rlvr COMMAND --help shows the options of a command. A first look: rlvr quickstart --name q0"]
        formatter.write(help.page("Usage: rlvr COMMAND [OPTIONS]", self.help or "", panels, footer=footer))


app = typer.Typer(
    cls=Commands,
    help="Reinforcement learning from verifiable rewards: sample, grade, train, and ask SQL what happened.",
    context_settings=HELP_OPTIONS,
)


def _say_version(value: bool) -> None:
    if value:
        print(f"rlvr {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", is_eager=True, callback=_say_version, help="Print the version."),
) -> None:
    pass


def build(name: str) -> TyperCommand:
    """Build the Typer command for a config: one parameter per option."""
    config_type = config_of(name)
    known = {option.name: option for option in options(config_type)}

    def run(**flags: Any) -> None:
        # An option that was not given is None: leave it out, so that run.json records it as a default.
        flags.pop("help_all", None)
        given = {k: combined(known[k], v) if isinstance(v, list) else v for k, v in flags.items() if v is not None}
        try:
            config = resolve(config_type, flags=given, command=name)
        except RlvrError as e:
            raise UsageError(e.problem, e.hint) from e
        with process.left_on_interrupt(), process.importing():
            module = importlib.import_module(f"rlvr_cli.commands.{module_of(name)}")
        module.run(config)

    parameters = [_parameter(option, command=name) for option in known.values()]
    run.__signature__ = inspect.Signature([*parameters, _HELP_ALL])  # type: ignore[attr-defined]
    alone = typer.Typer(add_completion=False)
    settings = {**HELP_OPTIONS, "ignore_unknown_options": name in PASSING_ON}
    alone.command(name, cls=Command, help=summary_and_examples(config_type)[0], context_settings=settings)(run)
    command = typer.main.get_command(alone)
    assert isinstance(command, TyperCommand)
    return command


def _help_all(ctx: typer.Context, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta["help_all"] = True
        print(ctx.get_help())
        raise typer.Exit


_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=bool,
    default=typer.Option(False, "--help-all", is_eager=True, callback=_help_all, help="Show every option and exit."),
)


def _parameter(option: Field[Any], *, command: str) -> inspect.Parameter:
    kind, repeatable, choices, _ = value_type(option)
    name, kinds = flag(option.name), option.metadata["completes"]

    def complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        if kinds:
            return complete_value(kinds, command=command, given=ctx.params, typed=incomplete)
        return [(choice, "") for choice in choices if choice]

    def parse(text: str) -> Any:
        try:
            return read_value(option, text)
        except RlvrError as e:
            raise UsageError(e.problem, e.hint) from e

    shown: dict[str, Any] = {"help": option.metadata["help"], "rich_help_panel": option.metadata["group"]}
    shown["show_default"] = False
    if COMPLETE in os.environ:  # Typer inspects the function of each option
        shown["autocompletion"] = complete
    if option.metadata["argument"]:
        info = typer.Argument(None, metavar=option.name.upper(), parser=parse, **shown)
    elif kind is bool:
        info = typer.Option(None, f"{name}/--no-{name[2:]}", **shown)
    else:
        info = typer.Option(None, name, metavar=_metavar(option), parser=parse, **shown)
    annotation = list[kind] if repeatable or option.metadata["joined_by"] else kind
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=info)


def _metavar(option: Field[Any]) -> str:
    return {str: "TEXT", int: "INT", float: "NUMBER"}[value_type(option).kind]


def command_help(name: str, usage: str, *, every: bool) -> str:
    """Format the help of a command: the common options, or all of them with `every`."""
    config_type = config_of(name)
    summary, examples = summary_and_examples(config_type)
    panels: dict[str, list[help.Row]] = {"Arguments": []}
    known = [option for option in options(config_type) if not option.metadata["argument"]]
    for option in options(config_type):
        if option.metadata["argument"]:
            panels["Arguments"].append(help.Row((option.name.upper(),), option.metadata["help"]))
        elif every or option.metadata["common"]:
            panels.setdefault(option.metadata["group"], []).append(_row(option, command=name))
    hidden = len(known) - sum(map(len, panels.values())) + len(panels["Arguments"])
    panels["Help"] = [
        help.Row(("-h, --help",), "Show the most common options and exit."),
        help.Row(
            ("--help-all",),
            f"Show all {len(known)} options and exit." if hidden else "The same; these are all the options.",
        ),
    ]
    footer = [f"{hidden} more options: rlvr {name} --help-all", ""] if hidden else []
    return help.page(usage, summary, panels, footer=[*footer, "Examples:", *(f"  {line}" for line in examples)])


def _row(option: Field[Any], *, command: str) -> help.Row:
    """Return the help row of an option, with its choices and default."""
    kind, repeatable, choices, forms = value_type(option)
    if option.metadata["completes"] == "preset":
        choices = preset_names(command)
    name, text = flag(option.name), option.metadata["help"]
    if choices:
        text += f" [{'|'.join([*filter(None, choices), *forms])}]"
    if kind is bool:
        return (
            help.Row((name, f"--no-{name[2:]}"), f"{text} [default: on]") if option.default else help.Row((name,), text)
        )
    default: Any = option.default
    if repeatable:
        default = " ".join(default)
    if default not in (None, ""):
        text += f" [default: {default}]"
    return help.Row((f"{name} {_metavar(option)}",), text)


def _brief(text: str) -> str:
    """Shorten an option's help to its first phrase, at most 60 characters, for a completion menu."""
    first = text.split(". ")[0].split(": ")[0].split(" (")[0].split(";")[0].rstrip(".")
    return first if len(first) <= 60 else f"{first[:59]}…"


def unknown_command(name: str) -> UsageError:
    """Return the error for an unknown command, with a suggestion; some likely names are queries of `rlvr analyze`."""
    from rlvr_cli.analysis.queries.named_queries import named_queries

    problem = f"There is no command {name!r}."
    if name in MOVED or name in named_queries():
        return UsageError(problem, f"Did you mean: rlvr {MOVED.get(name, f'analyze {name}')}")
    near = nearest(name, COMMANDS)
    return UsageError(problem, f"Did you mean: rlvr {near[0]}" if near else f"The commands: {', '.join(COMMANDS)}.")


def usage_error(error: typer.TyperException, arguments: Sequence[str]) -> UsageError:
    """Convert a parser error into a two-line error."""
    name = next((word for word in arguments[:1] if word in COMMANDS), "")
    path = f"rlvr {name}".strip()
    if not hasattr(error, "possibilities"):  # only the error for an unknown option has this attribute
        return UsageError(error.format_message(), f"{path} --help shows the usage.")
    option: str = getattr(error, "option_name")  # noqa: B009
    typed = next((word.partition("=")[0] for word in arguments if word.startswith(option)), option)  # -lr is read as -l
    if not name:
        return UsageError(f"rlvr has no option {typed}.", "Options come after the command: rlvr COMMAND --help")
    known = [option.name for option in options(config_of(name)) if not option.metadata["argument"]]
    near = suggested_options(typed.removeprefix("--no-"), known)
    hint = f"Did you mean {' or '.join(map(flag, near))}? " if near else ""
    return UsageError(f"{path} has no option {typed}.", f"{hint}{path} --help-all lists every option.")


def invoke(arguments: Sequence[str]) -> int:
    """Run a command and return its exit status. Errors propagate as exceptions."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("rlvr", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as e:
        return e.exit_code
    except typer.TyperException as e:
        raise usage_error(e, arguments) from e
    return 0


def main() -> None:
    """The `rlvr` script."""
    process.limits_apply = True
    # Torch's idle threads would busy-wait and slow everything (measured: 40 times) when another process needs a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    streams.claim()
    try:
        if COMPLETE in os.environ:  # called by a shell's completion script
            typer.main.get_command(app).main(prog_name="rlvr", complete_var=COMPLETE)
        status = invoke(sys.argv[1:] or ["--help"])
        streams.finish()
        sys.exit(status)
    except RlvrError as e:
        fail(e.problem, e.hint, status=2 if isinstance(e, UsageError) else 1)
    except (Interrupted, KeyboardInterrupt) as e:
        print(f"interrupted{f': {printable(str(e))}' if str(e) else ''}", file=sys.stderr, flush=True)
        if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
            # One that cannot be stopped, such as in a verifier of the user's: Python would wait for it.
            streams.flush()
            process.leave(130)
        sys.exit(130)
    except BrokenPipeError:
        streams.discard()  # the reader closed the pipe
        sys.exit(0)
    except Exception as e:  # libraries say in errors of any kind that memory or threads are short
        if (short := short_of_resources(e)) is not None:
            fail(short.problem, short.hint, status=1)
        if not isinstance(e, OSError) or e.filename is None or e.errno is None:
            raise
        fail(f"{os.strerror(e.errno)}: {os.fsdecode(e.filename)}", "", status=1)


def fail(problem: str, hint: str, *, status: int) -> NoReturn:
    """Print an error, without secrets, and end the process."""
    print(f"error: {printable(redacted(problem))}", file=sys.stderr)
    if hint:
        print(f"  {printable(redacted(hint))}", file=sys.stderr)
    streams.flush()
    sys.exit(status)
