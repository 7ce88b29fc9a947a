"""Sweeps: many runs of one pipeline that differ in a few settings, and their results. Only `sampler` imports Optuna."""
