"""What ``benchmarks/gpu.py`` runs, each part in a process of its own: ``docs/gpu.md``.

- ``run``: the parts one after another within their time, and ``results.json``; ``record``: a part's own file
- ``machine``: the device, its driver, and versions
- ``correctness``: tokens and hidden states of chains (``chains``) against transformers on the same device
- ``graphs``: decoding with and without CUDA graphs beside its roofline; int8 kernels
- ``streams``: one queue against a CUDA stream per session; ``copies``: pinned copies against pageable ones
- ``calibration``: times and memory of one block of BLOOM-176B, as hardware profiles
- ``serving``: a chain of server processes that share the device, and what the calibrated stub predicts
- ``figures``: what is drawn

Only the parts import torch, never ``run``.
"""

import nodes.blocks  # noqa: F401 - sets what torch reads when it is imported
