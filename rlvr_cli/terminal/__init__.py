"""Terminal output: messages, progress, tables, rollouts and help."""
