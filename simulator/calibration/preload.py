"""Imported once by the server that workers are forked from, so that each of them starts at once."""

import torch
import torch.distributed
import torch.nn.functional

__all__ = ["torch"]
