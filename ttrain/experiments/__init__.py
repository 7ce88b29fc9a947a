"""Settings compared over common seeds: changes, rounds, verdicts. Only `sampler` imports Optuna."""
