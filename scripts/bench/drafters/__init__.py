"""Comparison of all drafters on one target."""
