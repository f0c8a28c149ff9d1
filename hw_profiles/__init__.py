"""Hardware profiles: one YAML file for each type of cluster."""
