"""The command line: config dataclasses become click options; a command's code is imported only when it runs.

Enters: argv. Leaves: exit status 0, 1 (the user can put it right), 2 (usage) or 130 (interrupted, what was done is kept).
"""

import importlib
import inspect
import os
import sys
from dataclasses import Field
from typing import Any

import click

from rlvr_cli import __version__, process
from rlvr_cli.config.analyze import AnalyzeConfig
from rlvr_cli.config.check import CheckConfig
from rlvr_cli.config.ei import EiConfig
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.filter import FilterConfig
from rlvr_cli.config.grade import GradeConfig
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.options import Provenance, flag, options, value_type
from rlvr_cli.config.quickstart import QuickstartConfig
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.config.sources import resolve
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.text import printable

COMMANDS: dict[str, type[Provenance]] = {
    "quickstart": QuickstartConfig,
    "eval": EvalConfig,
    "sft": SftConfig,
    "ei": EiConfig,
    "grpo": GrpoConfig,
    "grade": GradeConfig,
    "filter": FilterConfig,
    "analyze": AnalyzeConfig,
    "check": CheckConfig,
}


class GroupedHelp(click.Command):
    """Prints the options under the headings of their groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            heading = parameter.group if isinstance(parameter, Knob | Positional) else "Help"
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(heading, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class Knob(click.Option):
    """An option that knows its group."""

    group: str


class Positional(click.Argument):
    """An argument that has a line in the help."""

    group: str
    help: str

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.human_readable_name, self.help


def _parameter(option: Field[Any]) -> click.Parameter:
    kind, several = value_type(option)
    shown = " ".join(map(str, option.default)) if isinstance(option.default, tuple) else option.default
    help_text = option.metadata["help"]
    if option.metadata["choices"]:
        help_text += f" One of: {', '.join(option.metadata['choices'])}."
    if shown is not None and shown is not False and shown != "":
        help_text += f"  [default: {shown}]"
    # Absent is None (or empty): the config knows its default, and run.json says that it was one.
    if option.metadata["argument"]:
        argument = Positional([option.name], type=kind, required=False, nargs=-1 if several else 1)
        argument.group, argument.help = option.metadata["group"], help_text
        return argument
    name = flag(option.name)
    spelling = f"{name}/--no-{name[2:]}" if kind is bool else name
    metavar = None if kind is bool else {str: "TEXT", int: "INT", float: "NUMBER"}[kind]
    knob = Knob([spelling], type=kind, default=None, multiple=several, help=help_text, metavar=metavar)
    knob.group = option.metadata["group"]
    return knob


def _command(name: str, config_type: type[Provenance]) -> click.Command:
    def run(**flags: Any) -> None:
        given = {k: v for k, v in flags.items() if v is not None and v != ()}
        config = resolve(config_type, flags=given, command=name)
        importlib.import_module(f"rlvr_cli.commands.{name}").run(config)

    help_text = inspect.getdoc(config_type) or ""
    return GroupedHelp(
        name,
        callback=run,
        params=[_parameter(f) for f in options(config_type)],
        help=help_text,
        short_help=help_text.split(":")[0] + ".",
        context_settings={"help_option_names": ["-h", "--help"]},
    )


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rlvr", message="%(prog)s %(version)s")
def app() -> None:
    """Reinforcement learning from verifiable rewards: sample, grade, train, and ask SQL what happened."""


for _name, _config_type in COMMANDS.items():
    app.add_command(_command(_name, _config_type))


def main() -> None:
    """The `rlvr` script."""
    process.process_may_end = True
    # Torch's threads would spin while they wait, which starves them (measured: 40 times slower) when anything else wants a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        sys.exit(app.main(sys.argv[1:] or ["--help"], prog_name="rlvr", standalone_mode=False))
    except click.ClickException as e:
        # Not e.show(): what was typed may hold what a terminal acts on.
        if isinstance(e, click.UsageError) and e.ctx is not None:
            print(e.ctx.get_usage(), f"Try '{e.ctx.command_path} --help'.", sep="\n", file=sys.stderr)
        print(f"error: {printable(e.format_message())}", file=sys.stderr)
        sys.exit(e.exit_code)
    except RlvrError as e:
        print(f"error: {printable(e.problem)}", file=sys.stderr)
        if e.hint:
            print(f"  {printable(e.hint)}", file=sys.stderr)
        sys.exit(1)
    except (Interrupted, KeyboardInterrupt, click.Abort) as e:
        print(f"interrupted{f': {printable(str(e))}' if str(e) else ''}", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has left; nothing more to say
        sys.exit(0)
