"""What the metrics of a training run say: its curve, and what more data would give."""
