"""From tables to figures, and from figures to files or the terminal."""
