"""Time and memory of operators, messages and states."""
