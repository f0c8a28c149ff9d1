"""Runs whose computation sleeps for its predicted time."""
