"""Simulation: the exact acceptance of a drafter from one teacher-forced pass over finished answers."""
