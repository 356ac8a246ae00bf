"""``testbed calibrate``: measures a compute backend and fits the numbers that scenarios and the stub use.

- ``plan``: what is measured, and in which order
- ``measure``: drives a backend through a plan and keeps every sample
- ``client``: what the client itself takes per output token
- ``points``: samples of one kind together, with their median
- ``fit``: the paper's model and the better one, with errors and residuals
- ``memory``: memory against blocks and sessions
- ``verdict``: in words, where the paper's model holds and where it does not
- ``profile``: the hardware profile that scenarios load
- ``tables``, ``report``, ``figures``: what is written
- ``command``: puts it together
"""
