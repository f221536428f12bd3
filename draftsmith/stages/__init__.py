"""The stages of a run: answers, features, training, evaluation, export."""
