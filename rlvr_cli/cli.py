"""The command line: config dataclasses become Typer options; a command's code is imported only when it runs.

Enters: argv. Leaves: exit status 0, 1 (the user can put it right), 2 (usage) or 130 (interrupted, what was done is kept).
"""

import importlib
import inspect
import os
import sys
from dataclasses import Field
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from rlvr_cli import __version__
from rlvr_cli.config import AnalyzeConfig, EvalConfig, Provenance, SftConfig, flag, options, resolve, value_type
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.text import printable

COMMANDS: dict[str, type[Provenance]] = {"eval": EvalConfig, "sft": SftConfig, "analyze": AnalyzeConfig}


class GroupedHelp(TyperCommand):
    """Prints the options under the headings of their groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or "Help", []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


app = typer.Typer(
    name="rlvr",
    help="Reinforcement learning from verifiable rewards: sample, grade, train, and ask SQL what happened.",
    rich_markup_mode=None,  # rich cuts long option names and doubles the start-up time
    pretty_exceptions_enable=False,  # no dump of local variables: they can hold secrets
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"rlvr {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _parameter(option: Field[Any]) -> inspect.Parameter:
    kind, several = value_type(option)
    default = option.default
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    help_text = option.metadata["help"]
    if option.metadata["choices"]:
        help_text += f" One of: {', '.join(option.metadata['choices'])}."
    if shown is not None and shown is not False and shown != "":
        help_text += f"  [default: {shown}]"
    annotation = list[kind] if several else kind
    if option.metadata["argument"]:
        info = typer.Argument(help=help_text, show_default=False, metavar=option.name.upper())
    else:
        names = [f"{flag(option.name)}/--no-{option.name.replace('_', '-')}"] if kind is bool else [flag(option.name)]
        info = typer.Option(*names, help=help_text, show_default=False, rich_help_panel=option.metadata["group"])
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,  # absent: the config knows its default, and run.json says that it was one
        annotation=Annotated[annotation | None, info],
    )


def _add(name: str, config_type: type[Provenance]) -> None:
    def command(**flags: Any) -> None:
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in flags.items() if v is not None and v != []}
        _run(name, resolve(config_type, flags=given, command=name))

    command.__signature__ = inspect.Signature([_parameter(f) for f in options(config_type)])  # type: ignore[attr-defined]
    help_text = inspect.getdoc(config_type) or ""
    app.command(name, cls=GroupedHelp, help=help_text, short_help=help_text.split(":")[0] + ".")(command)


def _run(name: str, config: Provenance) -> None:
    importlib.import_module(f"rlvr_cli.commands.{name}").run(config)


for _name, _config_type in COMMANDS.items():
    _add(_name, _config_type)


def main() -> None:
    """The `rlvr` script."""
    # Torch's threads would spin while they wait, which starves them (measured: 40 times slower) when anything else wants a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except RlvrError as e:
        print(f"error: {printable(e.problem)}", file=sys.stderr)
        if e.hint:
            print(f"  {printable(e.hint)}", file=sys.stderr)
        sys.exit(1)
    except (Interrupted, KeyboardInterrupt) as e:
        print(f"interrupted{f': {printable(str(e))}' if str(e) else ''}", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has left; nothing more to say
        sys.exit(0)
