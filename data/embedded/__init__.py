"""The embedded default: a generated corpus and a tiny target trained on it."""
