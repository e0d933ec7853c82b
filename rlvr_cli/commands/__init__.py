"""One module per command, each with `run(config)`: the command's whole story on one page."""
