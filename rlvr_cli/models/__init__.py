"""The policy."""
