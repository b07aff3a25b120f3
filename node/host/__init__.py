"""The libp2p host: connections, streams and their limits, and what mends the library's defects (`patches/`)."""
