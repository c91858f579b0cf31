"""Everything that replaces a part of DeepSpeed's at run time, one file each; all else subclasses, or calls it.

Each file says what stock does and why that does not do here. Each looks at what it would replace, and leaves alone
what it does not know or what needs no patch.
"""
