"""The job secret, how both sides of a connection prove that they know it, and servers that require it."""
