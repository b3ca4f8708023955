"""Starts the nodes of a run on the machines of a cluster. Each node is the process that a user would have started there.

`node.py` is what runs on each machine, `cluster.py` speaks with Ray, `job.py` leads a run from its first node to its end.
None of them knows what nodes say to each other: that is the engine's.
"""
