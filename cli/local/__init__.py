"""`swarmnode local`: a swarm of real nodes on this machine, shown while it trains, with a report."""
