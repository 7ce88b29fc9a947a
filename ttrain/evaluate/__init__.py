"""Evaluation of models: task suites, metrics with confidence intervals, comparisons, promotion decisions."""
