"""The libp2p host: connections, streams and their limits, and what mends the library's defects (`patches/`)."""

from swarmnode.node.host.patches import leave_out_unused

leave_out_unused()
