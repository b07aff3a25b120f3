"""Known peers who need not be honest: an all-reduce whose every step can be checked (BTARD, arXiv 2106.11257)."""
