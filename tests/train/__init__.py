"""Optimizers, losses and metrics, beside Optax and NumPy on one device."""
