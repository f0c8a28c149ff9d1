"""Hardware profiles: one YAML file per cluster type, every number with its source."""
