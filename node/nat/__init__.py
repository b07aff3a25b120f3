"""Across NATs: knowing whether this node can be reached, being reached through relays, and getting rid of them."""
