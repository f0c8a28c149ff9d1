"""Hardware and time: profiles, topology, kernels, collectives and the engine that plays a step."""
