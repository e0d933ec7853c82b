"""Parts of `rlvr eval` beside its way from a dataset to its table."""
