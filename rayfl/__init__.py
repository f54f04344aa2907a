"""rayfl."""
