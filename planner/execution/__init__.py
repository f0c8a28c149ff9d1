"""Running plans on real processes and devices: launch, workers, data, verification."""
