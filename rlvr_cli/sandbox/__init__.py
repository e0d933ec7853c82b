"""Run a program that a model wrote: a fresh interpreter, bound by the kernel before the program's first line, see `run`."""
