"""Which units stand on which pipeline stage."""
