"""``testbed score``: a policy's figures on a frozen suite of settings, over those of reference policies."""
