"""A plan becomes a program: local operators and explicit collectives, in order, with their buffers.

What is simulated and what is executed both come from here. A step is a chain of segments, one
micro-batch each: the first gathers parameters that are stored sharded, the last synchronises the
accumulated gradients in fused messages beside the backward pass and updates the stored shards. Units may
compute again, and parameters be gathered unit by unit. Plans with pipeline stages are lowered one unit of
each kind at a time (`planner.lowering.pipeline`), by the same rules.
"""

from planner.lowering.options import lowering_options
from planner.lowering.placed import LoweringOptions
from planner.lowering.program import lower_graph

__all__ = ["LoweringOptions", "lower_graph", "lowering_options"]
