"""Training whose workers are killed again and again, and what that came to."""
