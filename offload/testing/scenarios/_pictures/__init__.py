"""A run to look at."""
