"""What there is to work with: ``machine`` (``testbed doctor``), ``model`` and ``topology`` (the commands of these names)."""
