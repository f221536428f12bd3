"""Trainers of other projects, run by their own Python beside ours."""
