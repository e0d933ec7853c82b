"""One module per command, each with `run(config)`."""
