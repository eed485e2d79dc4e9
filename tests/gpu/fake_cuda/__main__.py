"""python -m fake_cuda <module> …: runs the module with a CUDA device that is not there."""

import os
import runpy
import sys

import fake_cuda

fake_cuda.install()
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

# Threads of autograd still look for a device when the interpreter is taken down, and may abort: leave without that.
sys.stdout.flush()
os._exit(0)
