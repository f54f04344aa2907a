"""Machines that are not this one: getting them, checking them, and running a command there."""
