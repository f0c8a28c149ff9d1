"""Measuring the machine at hand and writing its hardware profile."""
