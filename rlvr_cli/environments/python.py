"""The tool `python`: a program of the policy's runs in the sandbox, and what it prints is its result.

Every call runs in a fresh interpreter: names of earlier calls are gone.
"""

from rlvr_cli.environments.tools import ToolError
from rlvr_cli.sandbox.run import OUTPUT_BYTES, Limits, run_program
from rlvr_cli.types import PROGRAM_SECONDS

NAME = "python"
LIMITS = Limits(seconds=PROGRAM_SECONDS, memory_bytes=1 << 30)


def run_python(program: str) -> str:
    """Run a Python program. Each call is a fresh interpreter: names of earlier calls are gone.

    Args:
        program: A program that prints its results.

    Returns:
        What it prints; of much, the end, which says so.

    Raises:
        ToolError: with what it printed before, if it fails.
    """
    execution = run_program(program.strip(), entry=None, limits=LIMITS)
    printed = execution.output.rstrip("\n")
    if execution.num_printed > OUTPUT_BYTES:
        printed = f"[cut: {execution.num_printed - OUTPUT_BYTES:,} bytes]\n{printed}"
    if execution.status != "ok":
        raise ToolError("\n".join(filter(None, (printed, execution.message or execution.status))))
    return printed
