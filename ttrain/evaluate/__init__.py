"""Evaluation of models: suites, metrics with confidence intervals, comparisons, promotion."""
