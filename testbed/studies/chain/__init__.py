"""Printed figures of the chain-composition paper (arXiv 2604.14993) beside simulated ones: see docs/validation.md."""
