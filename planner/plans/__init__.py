"""Strategies: what a plan holds, and the file it is written to."""
