"""The embedded default: texts and a tiny target trained on them."""
