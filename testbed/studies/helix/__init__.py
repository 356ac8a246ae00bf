"""Simulates a measured run of the system Helix (arXiv 2406.01566), and compares both: see
docs/validation.md.
"""
