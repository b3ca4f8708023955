"""Links between the GPUs of one host, timed with PyTorch: copies by the copy engines in a ring, and NCCL's all-reduce.

SUROGATE_TORCH_PYTHON names an interpreter that has PyTorch, where this one has not. NVLink multicast stays off
(`NCCL_NVLS_ENABLE=0`). Deliberately unknown here: the engine.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

BYTES = 256 << 20
ROUNDS = 20

# PyTorch orders a copy after the streams of both devices, so that a ring would go one by one: the runtime's own call.
COPIES = """
import ctypes, sys, time, torch
count, size, rounds = map(int, sys.argv[1:])
runtime = ctypes.CDLL("libcudart.so." + torch.version.cuda.split(".")[0])
source = [torch.ones(size, dtype=torch.uint8, device=f"cuda:{i}") for i in range(count)]
target = [torch.empty_like(of) for of in source]
streams = [torch.cuda.Stream(device=i) for i in range(count)]
for rank in range(count):
    target[rank].copy_(source[(rank + 1) % count])  # opens the way between the two
def ring():
    for rank in range(count):
        other = (rank + 1) % count
        to, at = ctypes.c_void_p(target[rank].data_ptr()), ctypes.c_void_p(source[other].data_ptr())
        stream = ctypes.c_void_p(streams[rank].cuda_stream)
        failed = runtime.cudaMemcpyPeerAsync(to, rank, at, other, ctypes.c_size_t(size), stream)
        assert failed == 0, failed
def wait():
    for stream in streams:
        stream.synchronize()
for _ in range(3):
    ring()
wait()
start = time.perf_counter()
for _ in range(rounds):
    ring()
wait()
print(size * rounds / (time.perf_counter() - start) / 1e9)
"""

ALL_REDUCE = """
import os, sys, time, torch
import torch.distributed as group
import torch.multiprocessing as processes
count, size, rounds = map(int, sys.argv[1:])
def rank(index):
    torch.cuda.set_device(index)
    group.init_process_group("nccl", init_method="tcp://127.0.0.1:29511", rank=index, world_size=count)
    x = torch.zeros(size // 4, device="cuda")
    for _ in range(3):
        group.all_reduce(x)
    torch.cuda.synchronize()
    group.barrier()
    start = time.perf_counter()
    for _ in range(rounds):
        group.all_reduce(x)
    torch.cuda.synchronize()
    if index == 0:
        print(size * rounds * 2 * (count - 1) / count / (time.perf_counter() - start) / 1e9)
    group.destroy_process_group()
if __name__ == "__main__":
    processes.spawn(rank, nprocs=count)
"""


def ask(program: str, count: int) -> str:
    """The figure that a program prints, or the end of its error."""
    python = os.environ.get("SUROGATE_TORCH_PYTHON", sys.executable)
    own = os.environ | {"NCCL_NVLS_ENABLE": "0"}
    # Spawned processes read the program again: it must lie in a file.
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "links.py"
        path.write_text(program, encoding="utf-8")
        words = [python, str(path), str(count), str(BYTES), str(ROUNDS)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=own)
    return f"{float(done.stdout):.0f} GB/s" if done.returncode == 0 else f"FAILED: {done.stderr[-200:]!r}"


def timed(most: int) -> Iterator[str]:
    """A line for 2, 4, … GPUs: what each reads from its neighbour while all read, and NCCL's bus rate."""
    count = 2
    while count <= most:
        copies, reduced = ask(COPIES, count), ask(ALL_REDUCE, count)
        yield f"links of {count} GPUs: copies in a ring {copies} each, NCCL all-reduce {reduced} (bus)"
        count *= 2
