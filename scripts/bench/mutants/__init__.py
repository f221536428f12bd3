"""Mutants: small faults put into the core, each of which some test must notice."""
