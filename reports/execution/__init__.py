"""Plans run on this machine beside their predictions and beside PyTorch written by hand."""
