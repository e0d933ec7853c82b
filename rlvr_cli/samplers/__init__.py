"""Prompts -> completions: one module an engine."""
