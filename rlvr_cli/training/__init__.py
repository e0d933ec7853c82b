"""Training: losses, optimizer updates, and what all training commands share (checkpoints, evaluations, weight sync)."""
