"""Prompts -> completions: one module per engine."""
