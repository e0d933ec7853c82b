"""How much memory tests let vLLM take in a trainer's process."""

import torch

# Of a GPU's memory for weights and cache; of a CPU's free memory for the cache, all of which is filled with zeros at the start.
CACHE_SHARE = 0.05 if torch.cuda.is_available() else 0.01
