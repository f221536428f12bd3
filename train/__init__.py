"""Training: launchables and the loop they share."""
