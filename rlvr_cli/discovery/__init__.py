"""Search with a verifier: programs that a model writes, run in the sandbox and judged by an exact verifier."""
