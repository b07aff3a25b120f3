"""Test doubles for those who study the protocols, as `trio.testing` has.

A simulated network, toy trainers, state in memory, liars. No room imports it.
"""
