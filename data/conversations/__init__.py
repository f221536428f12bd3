"""Conversations as token ids with masks: reading, templates, spans of answers."""
