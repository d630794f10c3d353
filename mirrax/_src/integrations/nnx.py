"""Flax NNX in a scope."""
