"""Compares response times printed in the chain-composition paper (arXiv 2604.14993) with simulated ones.

See docs/validation.md.
"""
