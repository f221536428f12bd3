"""From acceptance and costs to a decision: which drafts pay, at which batch, and what an engine is told."""
