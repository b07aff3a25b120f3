"""SAPO's learning half (2509.08721): policies learn from their own rollouts and from one another's (`learner.py`).

The daemon has no torch. It may import `tasks`, `vocabulary`, `groups` and `hub`, with which it checks and scores what
peers send, and has a model fetched; all else belongs to the trainer process.
"""
