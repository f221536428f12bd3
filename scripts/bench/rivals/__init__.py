"""Trainers of other packages, for comparison."""
