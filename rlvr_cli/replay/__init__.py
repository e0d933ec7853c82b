"""A run's updates, computed anew from its stored rollouts, options and first weights, without a line of training's code."""
