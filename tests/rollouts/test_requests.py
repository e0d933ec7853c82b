"""The seed of every sample."""

from rlvr_cli.rollouts.requests import request_seed


def test_seeds_depend_on_the_key_and_differ():
    def seed(**change):
        who = {"phase": "eval", "step": 0, "example_id": "a", "sample_index": 0, **change}
        return request_seed(0, **who)

    assert seed() == seed()
    others = [seed(phase="train"), seed(step=1), seed(example_id="b"), seed(sample_index=1)]
    assert len({seed(), request_seed(1, phase="eval", step=0, example_id="a", sample_index=0), *others}) == 6
    assert all(0 <= s < 2**63 for s in others)
