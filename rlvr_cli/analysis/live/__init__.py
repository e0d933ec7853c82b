"""`rlvr view`: the report of runs, served while they run."""
