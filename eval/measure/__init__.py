"""Measurements and result.json."""
