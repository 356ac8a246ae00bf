"""A run on several machines of a Ray cluster: a launcher on each, and control connections between them."""
