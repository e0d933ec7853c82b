"""Commands that work on stored runs: query, check, grade again, filter, export, view."""
