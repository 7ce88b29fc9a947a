"""The command line: one file per command group. Nothing imports it."""
