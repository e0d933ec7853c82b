"""Run the `rlvr` command line: `python -m rlvr_cli`."""

from rlvr_cli.cli import main

if __name__ == "__main__":
    main()
