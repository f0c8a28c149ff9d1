"""Sharding: placements, meshes, rules for each operator, and redistribution."""
