"""The exceptions that the command line shows to the user without a traceback.

Enters: what is wrong and where, and what to do about it. Leaves: two lines on stderr, and exit status 1 or, for a
`UsageError`, 2.
"""


class RlvrError(Exception):
    """An error that the user can fix: bad input, a missing extra, a run that another process is writing.

    Args:
        problem: what is wrong and where, in one sentence.
        hint: what to do about it; empty when the problem says it all.
    """

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.problem}\n{self.hint}" if self.hint else self.problem

    def __reduce__(self) -> tuple[type["RlvrError"], tuple[str, str]]:
        return type(self), (self.problem, self.hint)  # pickling between processes keeps both lines


class UsageError(RlvrError):
    """An error in the command line itself: exit status 2. Nothing was begun."""


class QuestionsRefused(RlvrError):
    """An endpoint refuses some questions, and would again; it has been asked all the others."""

    @classmethod
    def joined(cls, errors: "list[QuestionsRefused]") -> "QuestionsRefused":
        """Several as one, with the hint of the first."""
        return cls(" ".join(error.problem for error in errors), errors[0].hint)


class Interrupted(BaseException):
    """Ctrl-C or another of `process.STOP_SIGNALS`, raised at a safe point: the run stays readable and can be resumed."""


def missing_extra(package: str, extra: str) -> RlvrError:
    """The error for an optional dependency that is not installed."""
    return RlvrError(f"{package} is not installed.", f"Install it from the clone of rlvr: pip install -e '.[{extra}]'")


def short_of_resources(error: BaseException) -> RlvrError | None:
    """The error to show for one that says that the system refused memory or a thread; None for any other."""
    refusals = (
        "Resource temporarily unavailable",
        "Cannot allocate memory",
        "can't start new thread",
        "failed to map segment",  # of a library that is imported
    )
    if not isinstance(error, MemoryError) and not any(refusal in str(error) for refusal in refusals):
        return None
    return RlvrError(
        f"The system refused memory or a thread ({str(error).rstrip('.') or type(error).__name__}).",
        "End other programs, use smaller batches or files, or raise the limits: ulimit -v (memory), ulimit -u (threads).",
    )
