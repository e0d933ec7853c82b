"""The run directory: written by one process, readable by anyone at any time, whole after any kill."""
