"""Built-in networks: plain modules with the loss inside `forward`."""
