"""What the questions of datasets are compared by.

Enters: a dataset. Leaves: the texts of its questions, without the template of a prompt.
"""

from rlvr_cli.data.datasets import Dataset
from rlvr_cli.data.examples import is_prompt
from rlvr_cli.data.prompts import question_within
from rlvr_cli.errors import RlvrError


def bare_questions(dataset: Dataset, *, if_bare: str = "rename the field") -> list[str]:
    """The questions of a dataset, in order; of a prompt that was made with a built-in template, what was put into it.

    Args:
        if_bare: what the user can do if a prompt is the question alone.

    Raises:
        RlvrError: rows have a prompt of another template and no question. The words of the template would count as the question's.
    """
    questions: list[str] = []
    unknown = 0
    for e in dataset.examples:
        question = question_within(e.question)
        unknown += question is None and e.prompt is not None and is_prompt(dataset.question_field)
        questions.append(question or e.question)
    if unknown:
        raise RlvrError(
            f"{dataset.name}: {unknown} of {dataset.rows} rows have a formatted prompt and no question, which --decontaminate-against compares.",
            f"Add a field question; if a prompt is the question alone, {if_bare}.",
        )
    return questions
