"""Operator graphs of known decoder families, written from their sizes alone, without torch.

The graph equals the capture's in everything but `Node.source`, which is empty: no source line was run.
"""
