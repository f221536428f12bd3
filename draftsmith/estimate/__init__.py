"""What a run will take: time, disk and memory, from formulas."""
