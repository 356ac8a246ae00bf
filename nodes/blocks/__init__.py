"""Real transformer blocks. Only ``spec``, ``sizes``, ``files`` and ``memory`` do without torch and transformers.

- ``spec``: what to load and how to compute, as plain data; ``sizes``: real models' configurations by name
- ``files``: a checkpoint's files, also from the hub of models; ``checkpoint``, ``weights``: tensors out of
  them, or random ones; ``loading``: modules filled with those; ``quantised``: matrices in 4 or 8 bits
- ``family``: what BLOOM, Llama and their like each supply
- ``device``: what computes; ``memory``: what blocks and caches take of it; ``cache``: a session's keys and
  values
- ``ragged``: one forward for several sessions
- ``compute``: the server's backend; ``hub``: the client's part
"""

import os

# CUDA's numbers of GPUs are then the driver's, by which users know them, also where the cards are not alike.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
# Some of torch's operators on a GPU are else compiled when first used, for which a machine needs a C compiler. torch
# reads this when it is imported.
os.environ.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")
