"""Before the first step: what fits into memory and time, shown to the user and tried."""
