"""How a model computes: devices, precision, kernels, recomputation, shared prefixes."""
