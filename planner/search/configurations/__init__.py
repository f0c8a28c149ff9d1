"""Degrees, schedules and memory savings: branch and bound on a closed form of the step."""
