"""The trainer's process: started, confined, asked for work, and started again when it dies."""
