"""``ds_bamboo``: one file for each subcommand."""
