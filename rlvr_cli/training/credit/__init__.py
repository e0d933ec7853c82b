"""From rewards to what each token is credited with: advantages, generalized advantage estimation, shaped rewards."""
