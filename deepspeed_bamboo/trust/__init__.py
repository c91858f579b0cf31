"""Who may talk to a job: its secret, how both sides of a connection prove that they know it, and servers that ask."""
