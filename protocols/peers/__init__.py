"""What a node knows of its peers: which version they speak, whether they live, what rules they broke."""
