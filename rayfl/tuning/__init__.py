"""Sweeps: every row of a comparison tuned with the same budget by Ray Tune, each trial one federated run."""
