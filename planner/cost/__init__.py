"""What operators, messages and states take of time and memory."""
