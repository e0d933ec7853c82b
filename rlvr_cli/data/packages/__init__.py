"""Questions that another package gives."""
