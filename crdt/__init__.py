"""Replicated data: clocks, signed records, merge laws. Pure: no network, no files, no trio, no torch."""
