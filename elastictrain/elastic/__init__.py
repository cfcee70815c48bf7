"""Who is here: the agent that keeps a node's workers alive, and the membership by which a worker knows its place.

Agent and trainer meet only in :mod:`elastictrain.elastic.membership`; neither imports the other.
"""
