"""Everything with a lifetime: configuration, identity, the libp2p host, the daemon."""
