"""One HTML page about runs, self-contained."""
