"""What a run will need, from formulas."""
