"""The systems that bench_peers.py compares. `python -m peers SYSTEM WORKLOAD` runs one of them."""
