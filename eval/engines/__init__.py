"""Real serving engines: started, asked, and held against our decoder."""
