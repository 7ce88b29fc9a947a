"""Runs as people look at them: compared on a terminal, as pages that need no network, as pictures."""
