"""When two answers are the same: from text to verdict. Imports nothing of the house."""
