"""bitsandbytes, an extra, imported without what it prints."""

import importlib.util
import logging
from typing import Any

from rlvr_cli.errors import missing_extra


def check_bitsandbytes() -> None:
    """Raise RlvrError if bitsandbytes is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise missing_extra("bitsandbytes", "bitsandbytes")


def import_bitsandbytes() -> Any:
    """Import and return the package. Raises RlvrError if it is not installed."""
    check_bitsandbytes()
    quiet_bitsandbytes()
    import bitsandbytes

    return bitsandbytes


def quiet_bitsandbytes() -> None:
    """Keep its import silent, also by another package: on a CPU it warns that 4-bit kernels are missing, which nothing here uses."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
