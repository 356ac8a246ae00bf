"""A measured run of the system Helix (arXiv 2406.01566), simulated: see docs/validation.md."""
