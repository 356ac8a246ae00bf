"""An OpenAI-compatible endpoint in front of a running testbed (``testbed serve``).

- ``app`` speaks HTTP; ``openai`` reads bodies and writes answers; ``metrics`` counts for Prometheus
- ``guests`` turns a request into a session of one of the scenario's clients, and its tokens into a stream
- ``text`` is the tokenizer: real blocks' text, or the stub's
"""
