"""A run on several machines of a Ray cluster: one launcher on each, control connections relayed between them."""
