"""Hidden states of the target: computed, stored and read again."""
