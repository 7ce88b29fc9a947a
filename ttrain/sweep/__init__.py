"""Sweeps: many runs of one pipeline that differ in a few settings, chosen by Optuna, and their results.

Stages are run by `flows/trials.py`; only `study` imports Optuna.
"""
