"""Drafters that are not trained heads, and the description of any drafter for an evaluation."""
