"""Decide whether two answers are the same, from their texts. Imports nothing from the rest of rlvr_cli."""
