"""Workers come and go at iteration boundaries."""
