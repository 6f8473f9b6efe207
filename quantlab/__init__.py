"""Numerics of the recurrent decode state in state-space and linear-attention language models."""

__version__ = "0.1.0"
