"""The ops catalogue: one file per op with its float64 reference, shape grammar, properties and implementations."""
