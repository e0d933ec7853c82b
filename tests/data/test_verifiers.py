"""Questions of verifiers: how they are asked for, and what a process of its own reads. Those of runs are in `tests/environments`."""

import pytest

from rlvr_cli.config.shared.questions import split_datasets
from rlvr_cli.data.datasets import evaluation_spec, load_dataset
from rlvr_cli.data.packages.verifiers import VerifiersSpec, parse
from rlvr_cli.errors import RlvrError


def test_a_specification_has_arguments_of_any_kind():
    assert parse("verifiers:owner/a-b") == VerifiersSpec("owner/a-b", {}, None)
    assert parse('verifiers:a,x=1,y=["b","c"],z=easy,size=9') == VerifiersSpec(
        "a", {"x": 1, "y": ["b", "c"], "z": "easy"}, 9
    )
    assert split_datasets("math,verifiers:a,x=1,gsm8k") == ("math", "verifiers:a,x=1", "gsm8k")
    assert evaluation_spec("verifiers:a,size=3,x=1") == "verifiers:a,x=1"
    for spec, problem in {
        "a,x": "not KEY=VALUE",
        "a,x=1,x=2": "given twice",
        "a,size=0": "size",
        "": "names no",
    }.items():
        with pytest.raises(RlvrError, match=problem):
            parse(f"verifiers:{spec}")


@pytest.mark.slow  # its own process imports verifiers; training reads questions of it, too
@pytest.mark.extra("verifiers")
def test_a_process_that_is_no_fork_reads_the_questions():
    evaluation = load_dataset("verifiers:rlvr-mine", limit=2)
    assert [e.question for e in evaluation.examples] == ["Double 101.", "Double 102."]
    assert [e.id for e in evaluation.examples] == ["rlvr-mine-validation-1", "rlvr-mine-validation-2"]
    assert evaluation.notes == []
