"""``testbed calibrate``: measures a compute backend and fits the numbers that scenarios and the stub use.

- ``plan``: the cases that are measured, and their order
- ``backend``: opens the blocks and the client's part of the model
- ``measure``: runs the cases of a plan on a backend and keeps every sample
- ``batches``: measures and fits steps of several sessions together
- ``client``: measures the client's own time per output token
- ``points``: groups samples of equal conditions, with their median
- ``fit``, ``linear``: fit the paper's time model and the better one, with errors and residuals
- ``memory``: fits memory against blocks and sessions
- ``verdict``: sentences on where the paper's model holds and where it does not
- ``profile``: the hardware profile that scenarios load
- ``tables``, ``report``, ``figures``: the other files that are written
- ``command``: the command, which uses all of these; ``quick``: a profile in a few seconds
"""
