"""Losses between the target's distribution and the draft's."""
