"""Bytes from other nodes, from one or many: buffers, shards, and the state that a late node fetches."""
