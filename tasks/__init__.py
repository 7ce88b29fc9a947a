"""Prefect tasks: the generic task of a stage."""
