"""The simulator: hardware, programs and time."""
