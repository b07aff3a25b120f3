"""What goes over the wire, one file a protocol; speaks to peers only through `protocols.network`."""
