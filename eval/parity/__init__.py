"""What an engine must give for a few prompts of an export, and what usually causes it where it gives something else."""
