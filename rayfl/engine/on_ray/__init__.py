"""The Ray executor: a server actor, client actors in a placement group, and the cluster that they run in."""
