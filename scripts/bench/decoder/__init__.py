"""Benchmark of the decoder."""
