"""Kedro asks for this module; all its defaults hold."""
