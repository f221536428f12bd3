"""The conformance suite that every draft head passes."""
