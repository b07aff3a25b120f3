"""Training among strangers: contributions are committed, judged on held-out text, and counted by a chain of rosters."""
