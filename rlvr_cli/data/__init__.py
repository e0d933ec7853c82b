"""What is asked: datasets, prompts, traces, and their order."""
