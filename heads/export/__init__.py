"""Writing heads for serving engines."""
