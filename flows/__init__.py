"""The recipes, and all that needs Prefect to run them: flows, servers."""
