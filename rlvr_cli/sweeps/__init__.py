"""Sweeps: runs of one command that differ in an option, with several seeds each."""
