"""How far a search over configurations goes: counts, so that every machine finds the same."""

from __future__ import annotations

SOLVES = 96
"""Most partitions of one search."""
TABLES = 96
"""Most tables of one search, as `weight` and `TABLE_AGAIN` count them."""
LABELLED = 48
"""Most tables whose labels are made once a plan is found, each counted as the first one with its axes."""
PROOFS = 64
"""Tables whose labels are made beside those for the sake of the proof, the least bounds first, counted likewise."""
DIVE = 6
"""After so many tables each, the search goes for a plan before it makes more."""
TABLE_AGAIN = 0.05
"""How much others with the same axes count: they are made together with the first."""
NODES = 40_000
"""Most nodes that are opened in one search."""
WORK = {"bounds": 1500, "partition": 450}
"""Memory bounds, and kinds of units in partitions, that one search may count: one that has found a plan ends behind
those bounds, and behind those partitions what is left is bounded alone. Counts, so that every machine finds the same.
"""
IDEALISED = 4
"""How many times as much a bound counts that partitions units which cannot be divided."""
NEAR = 1.3
"""Alternatives are looked for up to so many times the best objective."""
ALIKE = 1.01
"""Storages of one configuration whose bounds lie that near one another are timed together."""
OTHERS = 500
"""Nodes that are opened for them at most where enough plans are there that differ less."""
NAMED = 32
"""Configurations of which it is said by how much they do not fit where none does."""
LOOSE = 4
"""After so many partitions with several chunks a rank, it counts how far they lie from their bounds."""
PROOF = 1e-9
"""Relative distance to the bound up to which a plan counts as proven to be the best."""
