"""Check of exports in real serving engines."""
