"""Parts of `rlvr analyze` beside its way from a query to rows."""
