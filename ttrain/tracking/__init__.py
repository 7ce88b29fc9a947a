"""Bring runs to MLflow and loggers, and artifacts back by key from a shared MLflow.

MLflow is a view of the home. `pusher` decides when to push, `tracked_runs` makes the content of a
run, `mlflow_mirror` writes what MLflow lacks, `registered` does so for the registry, `views` for
its pages; `client` opens MLflow; `artifact_source` fetches artifacts. Only this package imports
mlflow, and importing it does not.
"""
