"""Real transformer blocks.

Only ``spec``, ``sizes``, ``files`` and ``memory`` import neither torch nor transformers.

- ``spec``: what to load and how to compute, as plain data; ``sizes``: real models' configurations by name
- ``files``: a checkpoint's files, also from the Hugging Face hub; ``checkpoint``, ``weights``: tensors from
  them, or random ones; ``loading``: modules filled with those; ``quantised``: matrices in 4 or 8 bits
- ``family``: what differs between BLOOM and Llama models
- ``device``: the device that computes; ``memory``: how much memory blocks and caches take; ``cache``: a
  session's keys and values
- ``ragged``: one forward for several sessions; ``graphs``: decode steps as CUDA graphs
- ``compute``: the server's backend; ``hub``: the client's part
- ``text``: a checkpoint's tokenizer; ``tiny``: small random checkpoints; ``importing``: checkpoints from GGUF files;
  ``whole``: checks a chain's tokens
"""

import os

# CUDA's numbers of GPUs are then the driver's, by which users know them, also where the cards are not alike.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
# Some of torch's operators on a GPU are else compiled when first used, for which a machine needs a C compiler. torch
# since 2.13 reads this when it is imported; earlier versions have no such operators.
os.environ.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")
