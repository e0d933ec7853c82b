"""Runs in SQL: the database over their files, the named queries, and which runs and rows are meant."""
