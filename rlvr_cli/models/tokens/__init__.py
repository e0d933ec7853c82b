"""Tokenizers, chat templates, and batches of token ids."""
