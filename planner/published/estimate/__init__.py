"""Step time and memory of a training run from its configuration alone: network sizes, plan, software, hardware."""
