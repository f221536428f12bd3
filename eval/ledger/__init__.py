"""Acceptance as others count it: one set of counts, read from servers, logs and answers, and what each of them calls its ratios."""
