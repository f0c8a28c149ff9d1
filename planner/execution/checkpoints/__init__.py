"""Sharded state on disk: written whole or not at all, read by any plan."""
