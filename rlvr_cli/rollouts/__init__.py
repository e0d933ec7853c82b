"""Question x sampler x grader -> rows in the store."""
