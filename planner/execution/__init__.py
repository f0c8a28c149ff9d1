"""Execution: a lowered plan on real processes."""
