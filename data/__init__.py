"""Conversations -> token ids and masks -> hidden states -> batches."""
