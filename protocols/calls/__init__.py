"""Remote procedure calls between two nodes.

Many at a time on one long-lived stream each way, with deadlines and cancellation.
"""
