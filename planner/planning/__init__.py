"""A request from start to end: search, simulation of the best plans, reasons, limits."""
