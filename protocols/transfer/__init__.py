"""Bytes from other nodes, by hash or as they grow, from one peer or many.

Buffers, shards and the state that a late node fetches.
"""
