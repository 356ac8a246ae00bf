"""What there is to work with: ``machine`` (``testbed doctor``), ``model``, ``hardware``, ``topology``, ``workload``."""
