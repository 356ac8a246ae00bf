"""`testbed reproduce paper`: computes the paper's tables and sweeps again, and compares them with its printed
numbers.

- ``settings``: the experiments as data; ``paper_numbers.toml`` and ``paper``: the numbers that the paper
  prints
- ``lines``: the policies that are compared; ``windows``: the placements between PETALS and CG-BP
- ``runs``: one Monte-Carlo run of one setting; ``record``: its form on disk. Workers, store and progress are
  those of ``testbed.studies.sweep``
- ``breakdown``: how much each change contributes to the gain from PETALS to the proposed policy
- ``tables``, ``explain``, ``duel``, ``sweeps``, ``commands``, ``figures``: the output; ``collect`` and
  ``markdown``: their helpers
- ``command``: the command, which uses all of these
"""
