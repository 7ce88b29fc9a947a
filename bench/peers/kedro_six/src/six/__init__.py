"""A Kedro project of six nodes."""
