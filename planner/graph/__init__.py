"""The operator graph: capture, folding, scaling."""
