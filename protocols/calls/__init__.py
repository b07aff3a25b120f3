"""Remote procedure calls between two nodes: many at a time on one stream each way, with deadlines and cancellation."""
