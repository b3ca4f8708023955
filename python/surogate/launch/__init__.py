"""Starts the nodes of a run on the machines of a cluster. Each node is the process that a user would have started there.

`node.py` is what runs on each machine, `cluster.py` speaks with Ray, `job.py` leads a run from its first node to its end:
with the number of nodes that `wanted.py` allows, the further machines that `growth.py` finds, and the cause of an end from
`ends.py`. None of them knows what nodes say to each other: that is the engine's.
"""
