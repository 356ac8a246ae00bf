"""`testbed reproduce`: computes published evaluations again, and compares them with their printed numbers.

The settings are shipped studies (``scenarios/studies/paper.toml``, ``chain.toml``); workers, store and progress
are those of ``testbed.studies.sweep``.

- ``settings``: which point of the study is which cell or curve; ``paper_numbers.toml`` and ``paper``: the
  numbers that the paper prints
- ``runs``: one Monte-Carlo run of one setting; ``windows``: the placements between PETALS and CG-BP
- ``breakdown``: how much each change contributes to the gain from PETALS to the proposed policy
- ``tables``, ``explain``, ``duel``, ``sweeps``, ``commands``, ``figures``: the output; ``markdown``: their
  helper; ``command``: `testbed reproduce paper`, which uses all of these
- ``chain``: `testbed reproduce chain`
- ``helix``, ``helix_files``: `testbed reproduce helix`, a logged run of Helix served again on its routes
"""
