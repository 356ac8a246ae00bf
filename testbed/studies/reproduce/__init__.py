"""`testbed reproduce paper`: the paper's tables and sweeps, its printed numbers beside them.

- ``settings``: the experiments as data; ``paper_numbers.toml`` and ``paper``: what the paper prints
- ``lines``: the policies compared, and the placements between PETALS and CG-BP; ``windows`` places these
- ``runs``: one Monte-Carlo run of one setting; ``record``: its form on disk. Workers, store and progress are those of
  ``testbed.studies.sweep``
- ``breakdown``: how much of a gain comes from what
- ``tables``, ``explain``, ``duel``, ``sweeps``, ``figures``: what is written; ``collect`` and ``markdown`` help
- ``command``: puts it together
"""
