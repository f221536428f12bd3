"""The plan of a run: time, disk and memory, from formulas."""
