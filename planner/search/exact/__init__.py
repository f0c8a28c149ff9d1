"""Min-plus elimination over operators: exact, with proofs."""
