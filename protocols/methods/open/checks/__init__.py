"""What members of an open run verify of one another beyond the chain: audits of training, and unique work."""
