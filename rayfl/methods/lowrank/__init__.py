"""Low-rank adapters over a frozen base: one published method a file, on `base.py: LowRank`."""
