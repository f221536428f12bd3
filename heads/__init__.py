"""The draft heads, the frozen target, checkpoints and exports."""
