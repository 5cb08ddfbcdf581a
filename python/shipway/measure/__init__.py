"""Measuring: timed rounds over all routes, the machine's limits, prices, and the environment."""
