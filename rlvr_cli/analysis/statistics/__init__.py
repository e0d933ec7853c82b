"""Estimates with their uncertainty, comparisons, and what they say of a run."""
