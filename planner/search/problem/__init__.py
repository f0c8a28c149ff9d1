"""What is decided, what it costs, and what an answer is."""
