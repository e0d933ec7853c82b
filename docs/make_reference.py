"""The reference tables of docs/, made from the code.

    python docs/make_reference.py            # rewrites what stands between <!-- reference: NAME --> and <!-- /reference -->
    python docs/make_reference.py --check    # rewrites nothing; exit status 1, and the names, where a table is stale

Everything in a table comes from the code, except for the meaning of a column and the source of a formula: these are written by
hand in the last cell of the row, and are kept. A row whose last cell is empty counts as stale.
"""

import argparse
import ast
import functools
import importlib.util
import inspect
import itertools
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.analysis.statistics.estimators import share_interval
from rlvr_cli.cli import COMMANDS
from rlvr_cli.config import config_of
from rlvr_cli.config.distill import DistillConfig
from rlvr_cli.config.dpo import DpoConfig
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.parsing.options import flag, options, value_type
from rlvr_cli.config.parsing.sources import preset_path, read_toml
from rlvr_cli.config.ppo import PpoConfig
from rlvr_cli.runs.storage.schemas import grade_schema, metrics_schema, rollout_schema, segment_schema
from rlvr_cli.training.losses.distillation import DIVERGENCES
from rlvr_cli.training.losses.policy_gradient import KL_TYPES, LOSSES
from rlvr_cli.training.losses.preference import PREFERENCE_LOSSES
from rlvr_cli.training.planning.plan import ppo_formulas

DOCS = Path(__file__).parent
ROOT = DOCS.parent
BLOCK = re.compile(r"(<!-- reference: ([a-z ]+) -->\n)(.*?)(<!-- /reference -->)", re.DOTALL)
MEANING = re.compile(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", re.MULTILINE)
ARROW_LIST = re.compile(r"list<element: (\w+|struct<[^<>]*>)>")
ARROW_STRUCT = re.compile(r"struct<(.+)>")
SCHEMAS = {"rollouts": rollout_schema, "segments": segment_schema, "grades": grade_schema, "metrics": metrics_schema}
VALUES = {str: "TEXT", int: "INT", float: "NUMBER"}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a cell may hold any text."""
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def choices(option: Field[Any]) -> tuple[str, ...]:
    """The values that an option may have; empty where it may have any of its type."""
    expected = value_type(option)
    return tuple(filter(None, expected.choices)) + expected.forms


def shown(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(map(shown, value))
    if value is None or value == "":
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


@functools.cache
def configs() -> dict[str, type]:
    """The config dataclass of each command."""
    return {command: config_of(command) for command in COMMANDS}


class Description(NamedTuple):
    """How a page describes an option. Commands whose descriptions are equal share the option."""

    typed: str
    said: str


def described(option: Field[Any]) -> Description:
    """How a page describes an option of a command."""
    kind, repeatable, _, _ = value_type(option)
    name = flag(option.name)
    if option.metadata["argument"]:
        typed = f"{option.name.upper()}{'...' if repeatable else ''}"
    elif kind is bool:
        typed = f"{name}, --no-{name[2:]}"
    else:
        typed = f"{name} {VALUES.get(kind, 'TEXT')}"
    allowed = choices(option)
    return Description(typed, option.metadata["help"] + (f" One of: {', '.join(allowed)}." if allowed else ""))


@dataclass(frozen=True)
class SharedOption:
    """An option that several commands have, with the same description."""

    by_command: Mapping[str, Field[Any]]

    @property
    def group(self) -> str:
        """Its heading in the help of the first command; a page of this name describes it."""
        return next(iter(self.by_command.values())).metadata["group"]

    @property
    def default(self) -> Any:
        """The default of most of the commands."""
        return Counter(option.default for option in self.by_command.values()).most_common(1)[0][0]

    @property
    def free_on_resume(self) -> bool:
        return any(option.metadata["free_on_resume"] for option in self.by_command.values())


@functools.cache
def shared_options() -> dict[Description, SharedOption]:
    """The options that more than one command has."""
    found: dict[Description, dict[str, Field[Any]]] = {}
    for command, config in configs().items():
        for option in options(config):
            found.setdefault(described(option), {})[command] = option
    return {description: SharedOption(having) for description, having in found.items() if len(having) > 1}


def row(description: Description, default: Any, *, free_on_resume: bool) -> tuple[str, str, str]:
    """The row of an option where it is described."""
    return f"`{description.typed}`", shown(default), description.said.replace("<", "&lt;") + " †" * free_on_resume


def group_tables(group: str) -> Callable[[str], str]:
    """The shared options of a group: a table for each set of commands that have them."""

    def made(old: str) -> str:
        tables: dict[tuple[str, ...], list[tuple[str, str, str]]] = {}
        for description, shared in shared_options().items():
            if shared.group == group:
                found = row(description, shared.default, free_on_resume=shared.free_on_resume)
                tables.setdefault(tuple(shared.by_command), []).append(found)
        sections = [
            f"\nOptions of {', '.join(f'`{command}`' for command in commands)}:\n\n{table(('option', 'default', ''), rows)}"
            for commands, rows in tables.items()
        ]
        return "".join(sections) + "\n"

    return made


def option_tables() -> str:
    """A section for each command, with one table."""
    shared = shared_options()
    sections = [
        f"## rlvr {command}\n\n{introduction(config)}\n\n{table(('option', 'default', ''), command_rows(config, shared))}"
        for command, config in configs().items()
    ]
    return "\n" + "\n".join(sections) + "\n"


def command_rows(config: type, shared: Mapping[Description, SharedOption]) -> list[tuple[str, str, str]]:
    """The rows of a command, under the headings of the help: its own options; shared ones are named with the page that describes them,
    and have a row where the default is another one than there."""
    rows = []
    for group, having in itertools.groupby(options(config), key=lambda option: option.metadata["group"]):
        elsewhere: dict[str, list[str]] = {}  # page -> names of options
        here = []
        for option in having:
            description = described(option)
            found = shared.get(description)
            if found is None:
                here.append(row(description, option.default, free_on_resume=option.metadata["free_on_resume"]))
                continue
            elsewhere.setdefault(found.group, []).append(f"`{re.split('[ ,]', description.typed)[0]}`")
            if option.default != found.default:
                default = shown(option.default) or "none"
                here.append((f"`{description.typed}`", default, f"See {page_link(found.group)}."))
        seen = (f"See {page_link(page)} for {', '.join(names)}." for page, names in elsewhere.items())
        rows += [(f"**{group}**", "", " ".join(seen)), *here]
    return rows


def page_link(group: str) -> str:
    """The link from options.md to the page of a shared group."""
    return f"[{group}](options/{group.lower()}.md)"


def command_table() -> str:
    """The commands, what they do, and where their options are."""
    return table(("command", ""), ((f"[`rlvr {name}`](#rlvr-{name})", does) for name, does in COMMANDS.items()))


def introduction(config: type) -> str:
    """The docstring of a config: what the command does, and its examples as a block."""
    what, _, examples = (inspect.getdoc(config) or "").partition("\n\nExamples:\n")
    typed = "\n".join(line.strip() for line in examples.splitlines() if line.strip())
    return " ".join(what.split()) + (f"\n\n```sh\n{typed}\n```" if typed else "")


def preset_tables() -> str:
    """For each command a table of what its presets change."""
    names = sorted(path.stem for path in Path(preset_path("cs336", command="grpo")).parent.glob("*.toml"))
    sections = []
    for command, config in configs().items():
        values = {name: preset(name, command, config) for name in names}
        having = [name for name in names if values[name] is not None]
        if not having:
            continue
        rows = []
        for option in options(config):
            given = [(values[name] or {}).get(option.name, option.default) for name in having]
            if any(value != option.default for value in given):
                cells = ["" if value == option.default else shown(value) for value in given]
                rows.append((f"`{flag(option.name)}`", shown(option.default), *cells))
        found = table(("option", "default", *having), rows) if rows else f"{', '.join(having)}: the defaults.\n"
        sections.append(f"## rlvr {command}\n\n{found}")
    return "\n" + "\n".join(sections) + "\n"


def preset(name: str, command: str, config: type) -> Mapping[str, Any] | None:
    """What a preset sets for a command; None where it is not for that command."""
    path = preset_path("cs336", command="grpo").with_stem(name)
    return read_toml(config, path, command=command) if command in tomllib.loads(path.read_text()) else None


def query_table() -> str:
    """The named queries, with their parameters, and whether --plot draws them."""
    rows = []
    for query in named_queries().values():
        parameters = ", ".join(f"`{name}={value_text(value)}`" for name, value in query.parameters.items())
        drawn = "" if query.plot is None else "yes"
        rows.append((f"[`{query.name}`](#{query.name})", query.description, parameters, drawn))
    return table(("query", "answers", "parameters and defaults", "`--plot`"), rows)


def value_text(value: Any) -> str:
    """A parameter's default as `--set` takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def loss_table(old: str) -> str:
    """The values of --loss-type with their formulas at the default options, and the sources that stand there already."""
    sources, config = dict(MEANING.findall(old)), GrpoConfig()
    rows = []
    for name, loss in LOSSES.items():
        formula = loss.formula(**{option: getattr(config, option) for option in loss.options})
        where = f"; `{loss.where}`" if loss.where else ""
        taken = ", ".join(f"`{flag(option)}`" for option in loss.options)
        rows.append((f"`{name}`", f"`{formula}`{where}", taken, sources.get(name, "")))
    return table((f"`--loss-type` (default: `{config.loss_type}`)", "loss", "options", "source"), rows)


def kl_table(old: str) -> str:
    """The values of --kl-type with their formulas, what they descend, and the sources that stand there already."""
    sources = dict(MEANING.findall(old))
    rows = [
        (f"`{name}`", f"`{kind.formula}`", f"`{kind.descends}`", sources.get(name, ""))
        for name, kind in KL_TYPES.items()
    ]
    return table(
        (f"`--kl-type` (default: `{GrpoConfig().kl_type}`)", "term of a token's loss", "descends", "source"), rows
    )


def divergence_table(old: str) -> str:
    """The values of --divergence with their formulas and gradients, and the sources that stand there already."""
    sources = dict(MEANING.findall(old))
    rows = [
        (f"`{name}`", f"`{d.formula}`; `{d.where}`", f"`{d.gradient}`" if d.full else d.gradient, sources.get(name, ""))
        for name, d in DIVERGENCES.items()
    ]
    header = f"`--divergence` (default: `{DistillConfig().divergence}`)"
    return table((header, "loss of a token", "gradient, of the student's logits", "source"), rows)


def preference_table(old: str) -> str:
    """The values of --loss-type of rlvr dpo with their formulas and default options, and the sources that stand there already."""
    sources = dict(MEANING.findall(old))
    rows = []
    for name, loss in PREFERENCE_LOSSES.items():
        config = DpoConfig(loss_type=name)
        gamma = "gamma" if config.target_margin else ""
        defaults = f"`--beta {config.scale:g}`" + (f", `--gamma {config.target_margin:g}`" if gamma else "")
        formula = f"`{loss.formula(beta='beta', gamma=gamma)}`; `h = {loss.score}`"
        rows.append((f"`{name}`", formula, defaults, sources.get(name, "")))
    return table((f"`--loss-type` (default: `{DpoConfig().loss_type}`)", "loss of a pair", "default", "source"), rows)


def ppo_table(old: str) -> str:
    """The formulas of the plan of rlvr ppo, with the defaults and where another option changes one of them."""
    options = (
        {},
        {"gamma": 0.99, "gae_lambda": 0.95, "whiten_advantages": False},
        {"vf_coef": 0.1, "vf_cliprange": 0.2},
        {"kl_coef": 0.01},
        {"kl_coef": 0.01, "kl_clamp": True},
        {"kl_coef": 0.01, "kl_in": "loss"},
    )
    rows, usual = [], {}
    for given in options:
        typed = [
            flag(name).replace("--", "--no-", 1) if value is False else flag(name) + f" {value}" * (value is not True)
            for name, value in given.items()
        ]
        shown = " ".join(f"`{word}`" for word in typed) or "(the defaults)"
        formulas = ppo_formulas(PpoConfig(**given))
        rows += [(shown, name, f"`{formula}`") for name, formula in formulas.items() if usual.get(name) != formula]
        usual = usual or formulas
    return table(("options", "", "formula"), rows)


def arrow_type(text: str) -> str:
    """An Arrow type without angle brackets."""
    while (shorter := ARROW_LIST.sub(r"list of \1", text.replace(" not null", ""))) != text:
        text = shorter
    return ARROW_STRUCT.sub(r"(\1)", text)


def column_table(name: str) -> Callable[[str], str]:
    """Columns of a SQL table with their types, whether they may be NULL, and the meanings that stand there already."""

    def made(old: str) -> str:
        meanings = dict(MEANING.findall(old))
        with open_runs([]) as database:
            found = database.select(
                "SELECT column_name, data_type FROM duckdb_columns() WHERE table_name = $name AND NOT internal"
                " ORDER BY column_index",
                {"name": name},
            ).rows
        stored = {f.name: f for f in SCHEMAS[name]()} if name in SCHEMAS else {}
        rows = []
        for column, sql_type in found:
            field = stored.get(column)
            kind = str(sql_type).lower() if field is None else arrow_type(str(field.type))
            may_be_null = "yes" if field is not None and field.nullable else ""
            rows.append((f"`{column}`", kind, may_be_null, meanings.get(column, "")))
        return table(("column", "type", "NULL", ""), rows)

    return made


def room_table() -> str:
    """The rooms of tests/test_architecture.py, and the folders in them, as their docstrings say."""
    tree = ast.parse((ROOT / "tests/test_architecture.py").read_text(encoding="utf-8"))
    (rooms,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "ROOMS"
    )
    rows = []
    for room, what in rooms.items():
        folder = ROOT / "rlvr_cli" / room
        rows.append((f"`{room}{'/' if folder.is_dir() else '.py'}`", what))
        for inside in sorted(folder.rglob("__init__.py")):
            if inside.parent != folder:
                docstring = ast.get_docstring(ast.parse(inside.read_text(encoding="utf-8"))) or ""
                rows.append((f"`{inside.parent.relative_to(folder.parent)}/`", docstring.split("\n")[0].rstrip(".")))
    return table(("room", ""), rows)


def recipe_table() -> str:
    """What `benchmarks/recipes.py` has measured: the command, and for each seed the share that is right, with its interval."""
    spec = importlib.util.spec_from_file_location("recipes", ROOT / "benchmarks/recipes.py")
    assert spec is not None
    assert spec.loader is not None
    recipes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipes)
    stored = json.loads(recipes.STORED.read_text(encoding="utf-8"))

    def cell(measured: list[int] | None) -> str:
        if measured is None:
            return "not run"
        right, count = measured
        low, high = share_interval(right / count, count)
        return f"{right / count:.3f} [{low:.3f}, {high:.3f}]"

    rows = [
        (f"`{command.split(' --eval-every')[0]}`", *(cell(stored[name].get(str(seed))) for seed in range(3)))
        for name, command in recipes.RECIPES.items()
        if name in stored
    ]
    return table(("`rlvr ...`", "seed 0", "seed 1", "seed 2"), rows)


TABLES: dict[str, Callable[[str], str]] = {
    "commands": lambda old: command_table(),
    "options": lambda old: option_tables(),
    **{f"options of {group.lower()}": group_tables(group) for group in {s.group for s in shared_options().values()}},
    "presets": lambda old: preset_tables(),
    "queries": lambda old: query_table(),
    "losses": loss_table,
    "preference losses": preference_table,
    "kl types": kl_table,
    "ppo formulas": ppo_table,
    "divergences": divergence_table,
    "rooms": lambda old: room_table(),
    "recipes": lambda old: recipe_table(),
    **{f"columns of {name}": column_table(name) for name in ("rollouts", "segments", "grades", "metrics", "runs")},
}
# What is missing where the last cell of a row, which is written by hand, is empty.
HAND_KEPT = {name: "say what the column {} means" for name in TABLES if name.startswith("columns")}
HAND_KEPT |= {"losses": "say where the loss {} comes from", "kl types": "say where the KL type {} comes from"}
HAND_KEPT |= {"divergences": "say where the divergence {} comes from"}


def remade(text: str) -> str:
    """A page with its tables made anew."""
    return BLOCK.sub(lambda block: block[1] + TABLES[block[2]](block[3]) + block[4], text)


def stale() -> list[str]:
    """What is wrong with the tables of docs/, a line each."""
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
    blocks = [
        (path.relative_to(DOCS).as_posix(), block) for path, text in pages.items() for block in BLOCK.finditer(text)
    ]
    wrong = [f"no page has the table: {name}" for name in TABLES.keys() - {block[2] for _, block in blocks}]
    for page, block in blocks:
        new = TABLES[block[2]](block[3])
        if new != block[3]:
            wrong.append(f"{page}: {block[2]} is stale; run python docs/make_reference.py")
        if block[2] in HAND_KEPT:
            empty = [line.split("`")[1] for line in new.splitlines() if re.match(r"\| `\w+` .*\|  \|$", line)]
            wrong += [f"{page}: {HAND_KEPT[block[2]].format(name)}" for name in empty]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        for path in sorted(DOCS.rglob("*.md")):
            text = path.read_text(encoding="utf-8")
            if (new := remade(text)) != text:
                path.write_text(new, encoding="utf-8")
    wrong = stale()
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
