"""The input layer: datasets, records, distribution."""
