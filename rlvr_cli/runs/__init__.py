"""The run directory: written by one process, readable at any time, consistent after any kill."""
