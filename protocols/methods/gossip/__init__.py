"""Training in pairs that are drawn anew in each round, with no step that all take together (NoLoCo, 2506.10911)."""
