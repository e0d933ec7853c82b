"""The engine that comes with the package: it samples from a transformers model in this process."""
