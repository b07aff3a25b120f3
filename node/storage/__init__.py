"""What lies on the disk: the data directory, the replicated state, shards, data sets, checkpoints."""
