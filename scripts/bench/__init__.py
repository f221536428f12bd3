"""Benchmarks and checks of draftsmith itself."""
