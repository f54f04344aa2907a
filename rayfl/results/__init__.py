"""Output of runs: folders, tables, plots, comparison with published numbers, and the copy in MLflow."""
