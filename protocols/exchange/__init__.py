"""Exchange methods: how nodes that train apart agree, round by round, on one shared model."""
