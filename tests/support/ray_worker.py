"""A worker of Ray, without the program that Ray begins before it, which imports Ray a first time."""

import runpy
import sys

sys.argv.remove("--language=PYTHON")  # which that program is told
runpy.run_module("ray._private.workers.default_worker", run_name="__main__")
