"""What runs leave behind: folders, tables, plots, published numbers beside ours, and their copy in MLflow."""
