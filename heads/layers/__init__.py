"""Layers and attention that several draft heads are built of."""
