"""Pareto ways to run a unit of the network on the devices of a stage."""
