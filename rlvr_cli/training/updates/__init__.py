"""One optimizer update: cutting a batch into micro-batches, scores, gradients, and tensors of rollouts."""
