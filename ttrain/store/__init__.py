"""Artifacts, the records of runs, weight files."""
