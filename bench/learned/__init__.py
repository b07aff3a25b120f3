"""What `bench/learning.py` is made of: simulated workers, the ways in which they train together, and the report."""
