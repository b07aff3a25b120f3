"""DiLoCo among known peers: they agree on who takes part in a round, and all-reduce their pseudo-gradients."""
