"""Clusters: what stands in their files, and what rayfl does with them."""
