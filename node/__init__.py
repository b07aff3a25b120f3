"""Everything with a lifetime: configuration, identity, the libp2p host, the daemon."""

from swarmnode.node.host.patches import autotls

autotls.apply()
