"""How other nodes are found: join addresses, the address book, the DHT, the local network."""
