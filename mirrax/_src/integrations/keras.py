"""Keras in a scope."""
