"""Kills and damage: what a run directory is worth after a process dies in it or a disk spoils it."""
