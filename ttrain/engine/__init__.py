"""From a graph and a home to artifacts: plan, execution, processes, display."""
