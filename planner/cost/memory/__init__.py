"""Bytes that a training run holds on a device: states, activations, workspaces, and what the allocator keeps."""
