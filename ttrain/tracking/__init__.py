"""What brings runs of a home to other places, and artifacts back by their keys: MLflow, and loggers of curves.

The home is the truth (`ttrain/store`); MLflow is a view of it. `client` opens MLflow, `mirror` writes what it lacks of a
run, `registered` what it lacks of the registry, `views` how its pages show the runs, `book` notes what was pushed, and
`artifact_source` fetches artifacts from a shared server. No other package imports mlflow, and importing this one does not.
"""
