"""Comparisons of runs in a terminal, and pages that need no network."""
