"""Operator graphs: one training step of a network as typed records."""
