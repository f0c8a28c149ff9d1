"""Predictions beside published measurements: read, predicted, scored, and what hardware leaves open fitted."""
