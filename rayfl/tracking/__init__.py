"""What a run leaves behind: its folder on disk (the truth), MLflow (a copy that may lag), the terminal."""
