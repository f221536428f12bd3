"""Comparing results and holding them against thresholds, for CI."""
