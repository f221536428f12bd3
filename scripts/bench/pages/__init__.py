"""Tables and pictures of the pages of results."""
