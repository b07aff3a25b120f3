"""What bench/sapo.py runs: swarms of learners in one process, and the report."""
