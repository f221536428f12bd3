"""The frozen target: the model, its files, who it is, and what tunes it."""
