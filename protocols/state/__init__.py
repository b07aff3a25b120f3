"""The replicated state of a run: who keeps it equal on all nodes (push, repair), what comes in, and who is a member."""
