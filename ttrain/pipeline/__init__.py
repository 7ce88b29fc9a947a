"""Plan, resume, launch, processes, execution, names, lineage, summaries."""
