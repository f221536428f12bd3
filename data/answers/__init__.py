"""Answers of the target itself, and their split into training and held-out ones."""
