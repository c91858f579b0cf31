"""The placement solver: which worker hosts what, and who holds which shadow. Pure."""
