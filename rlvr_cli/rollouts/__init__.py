"""Collect rollouts: sample responses to questions, grade them and commit them to the run."""
