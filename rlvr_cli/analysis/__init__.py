"""What happened: SQL over runs, statistics, pictures, a page."""
