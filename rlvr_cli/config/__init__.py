"""What can be chosen: a module per command, over groups of options that they share."""

import importlib

from rlvr_cli.config.options import Provenance


def config_of(command: str) -> type[Provenance]:
    """The config of a command: `grpo` -> `config.grpo.GrpoConfig`. Imports that module alone."""
    return getattr(importlib.import_module(f"rlvr_cli.config.{command}"), f"{command.capitalize()}Config")
