"""From a plan to artifacts: what a run would do, runs of it without Prefect, and what was found cached."""
