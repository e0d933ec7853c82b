"""Several trainers, GPUs and machines: who computes what, and how weights and state go between them."""
