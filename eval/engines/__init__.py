"""Run real serving engines and compare them with our decoder."""
