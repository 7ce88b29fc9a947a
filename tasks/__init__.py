"""Prefect tasks: one generic stage task, one thin name per stage."""
