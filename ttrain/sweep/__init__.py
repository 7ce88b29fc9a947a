"""Sweeps: many runs of one pipeline that differ in a few settings, chosen by Optuna, and what came of them.

Nothing here runs a stage (`flows/sweep.py` does) and only `study` imports Optuna.
"""
