"""The recipe: its sections, and parsing from YAML and the command line."""
