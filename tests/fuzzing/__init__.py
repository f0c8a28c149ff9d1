"""Fuzzing: whatever stands in an input file, reading it succeeds or ends in the product's own error, soon."""
