"""What EAGLE-1, EAGLE-3 and P-EAGLE share."""
