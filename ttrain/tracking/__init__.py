"""What brings runs of a home to other places, and artifacts back by their keys: MLflow, and loggers of curves.

The home is the truth (`ttrain/store`); MLflow is a view of it. `pusher` decides when to push, `tracked_runs` makes what a
run shows, `mirror` writes what MLflow lacks of it, `registered` what it lacks of the registry, `views` how its pages show
the runs; `client` opens MLflow; `artifact_source` fetches artifacts from a shared one. No other package imports mlflow, and
importing this one does not.
"""
