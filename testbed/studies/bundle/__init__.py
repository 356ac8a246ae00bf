"""``testbed bundle`` and ``testbed reproduce FOLDER``: results with all that they were computed from, and computed again.

- ``command``: makes a bundle
- ``manifest``: ``bundle.json``, what is in a bundle
- ``again``: runs a bundle's command again, on copies of its inputs
- ``differences``: how two tables differ
- ``reproduce``: checks a bundle, computes it again and compares
"""
