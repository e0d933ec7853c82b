"""What a grader is tried on."""

from dataclasses import replace

from factories import a_rollout, an_episode
from rlvr_cli.rollouts.trial_grades import stored_cases
from rlvr_cli.runs.run_dir import RunDir


def test_stored_responses_are_those_that_are_graded(tmp_path):
    facts = {"prompt": {"text": "Q: {question}"}}
    with RunDir.create(tmp_path, "eval", name="r", metadata={"facts": facts}) as run:
        whole, episode = a_rollout(run_id=run.id, prompt="Q: 1+1?"), an_episode(run_id=run.id, sample_index=1)
        episode = replace(
            episode, response="2 [right] 3", episode=episode.episode._replace(graded_from=10, graded_to=11)
        )
        run.commit_rollouts("eval", 0, [whole, episode])
    second, first = stored_cases(run.path, limit=2)  # as they are drawn
    assert (first.response, first.example["question"]) == (whole.response, "1+1?")
    assert second.response == "3"


def test_the_responses_tried_are_drawn_from_all_and_not_those_that_were_done_first(tmp_path):
    with RunDir.create(tmp_path, "eval", name="r", metadata={"facts": {"prompt": {"text": "{question}"}}}) as run:
        for part in range(4):  # the shortest responses are done first
            rows = [a_rollout(run_id=run.id, example_id=f"q{part}-{i}", response=f"{part}") for i in range(16)]
            run.commit_rollouts("eval", 0, rows)
    drawn = stored_cases(run.path, limit=16)
    assert len(drawn) == 16
    assert {case.response for case in drawn} == {"0", "1", "2", "3"}
    assert [case.example["id"] for case in drawn] == [c.example["id"] for c in stored_cases(run.path, limit=64)[:16]]
