"""result.json: what an evaluation measured."""
