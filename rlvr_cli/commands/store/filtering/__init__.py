"""Parts of `rlvr filter` beside its way from rows to a file."""
