"""A server's acceptance, followed answer by answer: when it fell or rose, for which slice, and which requests made it so."""
