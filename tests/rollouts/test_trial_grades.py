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
    first, second = stored_cases(run.path, limit=2)
    assert (first.response, first.example["question"]) == (whole.response, "1+1?")
    assert second.response == "3"
