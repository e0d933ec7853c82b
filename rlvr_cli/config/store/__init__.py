"""Options of the commands that work on stored runs."""
