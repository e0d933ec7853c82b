"""`python -m rlvr_cli` is `rlvr`."""

from rlvr_cli.cli import main

if __name__ == "__main__":
    main()
