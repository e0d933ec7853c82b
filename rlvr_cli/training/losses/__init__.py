"""Losses per token or per row, and their normalization."""
