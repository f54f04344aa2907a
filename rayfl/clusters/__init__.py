"""Clusters: checks of their files, and commands run as jobs on them."""
