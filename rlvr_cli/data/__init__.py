"""Datasets, prompts, SFT traces, and the order in which examples are used."""
