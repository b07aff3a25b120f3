"""What a person types: `swarmnode …`. Talks to a running daemon only through its control socket."""
