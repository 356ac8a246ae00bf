"""Real transformer blocks. Only ``spec`` may be imported without torch and transformers.

- ``spec``: what to load and how to compute, as plain data
- ``family``: what BLOOM, Llama and their like each supply; ``checkpoint``: their weights, part by part
- ``cache``: a session's keys and values; ``compute``: the server's backend; ``hub``: the client's part
"""
