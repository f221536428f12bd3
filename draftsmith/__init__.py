"""draftsmith: train, measure and export draft heads for speculative decoding."""

__version__ = "0.1.0"
