"""What DFlash and DSpark share: a block of tokens drafted in one pass."""
