"""Mutants that change nothing that can be noticed, by file, line of code, text and substitute: why that is so."""

EQUIVALENT: dict[tuple[str, str, str, str], str] = {}
