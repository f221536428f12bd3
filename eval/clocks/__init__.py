"""What passes and answers take: drafters in turns, costs of passes, their table."""
