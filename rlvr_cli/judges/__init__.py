"""Judges: another model, behind an endpoint, grades what no rule can."""
