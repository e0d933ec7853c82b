"""The seed of every sample, and what an engine may compute once for all prompts."""

from rlvr_cli.data.prompts import load_prompt, prompt_of
from rlvr_cli.rollouts.requests import common_prefix, missing_samples, request_seed
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Example
from stores import a_rollout


def test_seeds_depend_on_the_key_and_differ():
    def seed(**change):
        who = {"phase": "eval", "step": 0, "example_id": "a", "sample_index": 0, **change}
        return request_seed(0, **who)

    assert seed() == seed()
    others = [seed(phase="train"), seed(step=1), seed(example_id="b"), seed(sample_index=1)]
    assert len({seed(), request_seed(1, phase="eval", step=0, example_id="a", sample_index=0), *others}) == 6
    assert all(0 <= s < 2**63 for s in others)


def test_prompts_have_in_common_what_all_of_them_begin_with():
    assert common_prefix(["ab 12", "ab 3", "ab 1"]) == "ab "
    assert common_prefix(["ab", "ab"]) == "ab"
    assert common_prefix(["b", "ab"]) == ""
    assert common_prefix(["ab"]) == ""


def test_what_an_interrupted_run_lacks_begins_as_it_did_before(tmp_path):
    """With the prompts of stored samples, so that the rest is computed in the same way."""
    examples = [
        Example(id=f"q{i}", question=question, ground_truth="8")
        for i, question in enumerate(("7 + 1", "12 + 1", "12 + 3"))
    ]
    template = load_prompt("r1_zero")
    asked = {"phase": "train", "step": 0, "examples": examples, "template": template, "num_samples": 2, "seed": 0}
    with RunDir.create(tmp_path, "eval", metadata={}) as run:
        _, requests = missing_samples(run, **asked)
        run.commit_rollouts("train", 0, [a_rollout(run.id, 0, sample_index=i) for i in (0, 1)])
        wanted, rest = missing_samples(run, **asked)
    assert [(e.id, indices) for e, indices in wanted] == [("q1", [0, 1]), ("q2", [0, 1])]
    assert rest == requests[1:]
    for request, example in zip(requests, examples, strict=True):
        assert request.prompt == prompt_of(example, template)
        assert request.common_prefix == template.text.partition("{question}")[0]
