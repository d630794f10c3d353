"""Scenarios that TensorFlow has answered, and the tests that ask mirrax the same."""
