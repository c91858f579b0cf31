"""Everything that replaces a part of DeepSpeed at run time, one file each. All other code subclasses it, or calls it.

Each file says what stock does and why that is not enough here. Each looks at what it would replace, and leaves alone
what it does not know or what needs no patch.
"""
