"""Calibration: measure a machine and write its profile."""
