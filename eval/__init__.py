"""Decode, simulate, measure and report."""
