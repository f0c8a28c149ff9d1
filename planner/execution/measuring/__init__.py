"""What a run measures, beside what was predicted of it."""
