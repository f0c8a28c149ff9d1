"""A plan becomes a program: local operators and explicit collectives, in order, with the memory that they take.

What is simulated and what is executed both come from here, pass by pass of the chunks of every pipeline rank; a plan on
one stage is a pipeline of one rank. The first micro-batch gathers parameters that are stored sharded, the last one
synchronises the accumulated gradients in fused messages beside the backward pass, and the stored shards are updated
behind it. `planner.lowering.pipeline` writes one unit of each kind, to be timed; `planner.lowering.stages` writes every
unit, to be executed.
"""
