"""Signals of a batch system in processes that belong to a run, and in their own children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

PROGRAM = """
import multiprocessing, os, signal, time
from surogate.environment.signals import leave_to_the_run
leave_to_the_run()
os.kill(os.getpid(), signal.SIGTERM)
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
child.terminate()
child.join(20)
print(child.exitcode)
"""


def test_a_forked_child_of_a_process_of_a_run_ends_by_a_signal():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=50)
    assert found.stdout.split() == [str(-signal.SIGTERM)], found.stderr
