"""The tool `calc`: exact arithmetic over whole numbers, with + - * / and parentheses."""

from rlvr_cli.environments.tools import ToolError
from rlvr_cli.graders.countdown import NotAnEquation, evaluate

NAME = "calc"


def calculate(expression: str) -> str:
    """Calculate exactly, over whole numbers.

    Args:
        expression: Whole numbers with + - * / and parentheses, such as 47*83.

    Returns:
        The value, such as 3901 or 7/2.
    """
    try:
        value, _ = evaluate(expression)
    except NotAnEquation as problem:
        raise ToolError(f"this is no arithmetic: {problem}") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    return str(value)
