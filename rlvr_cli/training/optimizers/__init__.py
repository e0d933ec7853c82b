"""How weights are updated: gradients summed and clipped, AdamW and its variants, their state, and where it is kept."""
