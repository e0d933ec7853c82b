"""Parts of `rlvr discover` beside its way from a task to the best program."""
