"""The options of the commands: one module per command, built from shared groups of options."""

import importlib

from rlvr_cli.config.parsing.options import Provenance

ON_STORED_RUNS = ("analyze", "check", "export", "fetch", "filter", "grade", "runs", "view")


def module_of(command: str) -> str:
    """Return the module of a command below `config` and below `commands`: `store.analyze` of a command on stored runs, `grpo`."""
    return f"store.{command}" if command in ON_STORED_RUNS else command


def config_of(command: str) -> type[Provenance]:
    """Return the config class of a command: `grpo` -> `config.grpo.GrpoConfig`. Imports only that module."""
    module = importlib.import_module(f"rlvr_cli.config.{module_of(command)}")
    return getattr(module, f"{command.capitalize()}Config")
