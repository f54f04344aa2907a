"""Clusters: how `ray up` makes one, whether it is fit for a sweep, and sweeps that run there."""
