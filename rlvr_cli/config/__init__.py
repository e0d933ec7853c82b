"""The options of the commands: one module per command, built from shared groups of options."""

import importlib

from rlvr_cli.config.options import Provenance


def config_of(command: str) -> type[Provenance]:
    """Return the config class of a command: `grpo` -> `config.grpo.GrpoConfig`. Imports only that module."""
    return getattr(importlib.import_module(f"rlvr_cli.config.{command}"), f"{command.capitalize()}Config")
