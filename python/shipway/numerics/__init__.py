"""How results are judged: dtypes and roundings, verdicts per op and per model, the float64 reference model."""
