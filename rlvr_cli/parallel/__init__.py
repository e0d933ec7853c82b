"""Processes that work for a run, all started, called, watched and ended in the same way, and memory that they share."""
