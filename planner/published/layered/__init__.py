"""Networks other than language models, layer by layer: convolutional, vision and recurrent ones, by name."""

from planner.published.layered.lookup import lookup, lookup_by_parameters

__all__ = ["lookup", "lookup_by_parameters"]
