"""Episodes: an environment answers the policy, turn after turn."""
