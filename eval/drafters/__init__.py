"""What drafts beside trained heads, and what is measured of any drafter."""
