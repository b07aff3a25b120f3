"""What members of an open run verify of one another beyond the chain: audits of training, unique work, reputation."""
