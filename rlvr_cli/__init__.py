"""rlvr: reinforcement learning from verifiable rewards, with every rollout in Parquet."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlvr_cli.notebook import open_run, open_runs

__all__ = ["__version__", "open_run", "open_runs"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the functions for notebooks when they are used: the command line needs none of them."""
    if name in ("open_run", "open_runs"):
        from rlvr_cli import notebook

        return getattr(notebook, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
