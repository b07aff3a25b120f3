"""The distributed hash table, as far as no network library is needed: iterative lookups."""
