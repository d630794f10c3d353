"""Random programs, compared with plain NumPy."""
