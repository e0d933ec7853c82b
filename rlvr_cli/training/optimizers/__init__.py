"""How weights are updated: AdamW and its variants, their state, and where it is kept."""
