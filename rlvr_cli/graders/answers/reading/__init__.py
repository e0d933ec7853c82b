"""Answers as mathematical objects: tokens, grammar, sentences."""
