"""What bench/sapo.py runs: swarms of learners in one process, attackers among them, and the report."""
