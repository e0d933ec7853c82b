"""Per-token losses, and what they are divided by."""
