"""Runs as people look at them: compared on a terminal, and as pages that need no network."""
