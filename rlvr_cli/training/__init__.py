"""What is learned: one optimizer update, and what surrounds an algorithm."""
