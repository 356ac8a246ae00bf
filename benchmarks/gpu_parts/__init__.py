"""The parts of ``benchmarks/gpu.py``, each of which runs in a process of its own: ``docs/gpu.md``.

- ``plan``: what will be done, and for how long
- ``run``: runs the parts one after another within their time, and writes ``results.json``; ``record``: a
  part's own file
- ``machine``: the device, its driver, and versions; ``tests``: the project's tests that need a GPU
- ``correctness``: tokens and hidden states of chains (``chains``) compared with transformers on the same
  device
- ``graphs``: decoding with and without CUDA graphs, compared with its roofline (``limits``); int8 kernels
- ``streams``: one queue compared with a CUDA stream per session; ``copies``: pinned compared with pageable
  copies
- ``steps``: times of a block by sessions, context and prompt; ``batches``: steps of several sessions, fitted
- ``calibration``: times and memory of blocks of BLOOM-176B, as hardware profiles
- ``serving``: a chain of server processes that share the device, compared with the calibrated stub
- ``models``: tokens of whole models; ``cluster``: servers that are killed; ``endpoint``: the HTTP endpoint
- ``commands``, ``here``, ``sizes``: what parts share; ``figures``: figures

Only the parts import torch, never ``run``.
"""

import nodes.blocks  # noqa: F401 - sets what torch reads when it is imported
