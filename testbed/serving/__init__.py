"""An OpenAI-compatible endpoint in front of a running testbed (``testbed serve``).

- ``app``: the HTTP server; ``openai``: reads request bodies and writes responses; ``metrics``: metrics for
  Prometheus
- ``guests``: turns a request into a session of one of the scenario's clients, and its tokens into a stream
- ``text``: tokenizers: the model's for real blocks, made-up text for the stub
"""
