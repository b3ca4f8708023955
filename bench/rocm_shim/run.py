"""Runs the engine through its tables of AMD's functions on an NVIDIA card: `python bench/rocm_shim/run.py FOLDER`.

FOLDER has what `bench/rocm_shim/build.sh FOLDER` made. Needs the built extension, an NVIDIA GPU of compute capability 8.0 or
more, and NVRTC and cuBLASLt as wheels or on the loader's path. Prints one line for each check, and exits with 1 if one fails:

    doctor: HIP 7.1, hiprtc, hipBLASLt; GPU 0: …, gfx1100
    operations on …: N results, 0 differ
    sft, LoRA: 20 losses, largest difference between rocm and cuda …
    sft, full: …
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Other kernels and other algorithms round otherwise: losses of bf16 after a few steps.
MOST = 0.02


def environment(folder: Path, of_amd: bool) -> dict[str, str]:
    wheels = [str(of) for site in sys.path for of in Path(site).glob("nvidia/*/lib") if of.is_dir()]
    found = os.environ | {"PYTHONPATH": str(ROOT / "python"), "LD_LIBRARY_PATH": ":".join(wheels)}
    if of_amd:
        closed = folder / "closed"
        closed.mkdir(exist_ok=True)
        # With its own driver not usable, `device: auto` does not take the card as NVIDIA's.
        (closed / "libcuda.so.1").write_text("")
        intrinsics = str(folder / "intrinsics_nvidia.cuh")
        found |= {"SUROGATE_CUDA_PATH": str(closed), "SUROGATE_ROCM_PATH": str(folder), "SHIM_INTRINSICS": intrinsics}
    return found


def surogate(folder: Path, of_amd: bool, *words: str) -> str:
    command = [sys.executable, "-m", "surogate", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(folder, of_amd), cwd=ROOT)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def losses(folder: Path, of_amd: bool, output: Path, *options: str) -> list[float]:
    device = "rocm" if of_amd else "cuda"
    run = ROOT / "examples" / "stories.yaml"
    words = ["sft", str(run), "--device", device, "--output-dir", str(output), "--max-steps", "20", *options]
    surogate(folder, of_amd, *words)
    (log,) = output.glob("log-*.json")
    events = map(json.loads, log.read_text().splitlines())
    return [event["loss"] for event in events if event["event"] == "step"]


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    print(surogate(folder, True, "doctor"))
    print(surogate(folder, True, "doctor", "--operations").splitlines()[-1])
    failed = False
    with tempfile.TemporaryDirectory() as place:
        for name, options in {"LoRA": [], "full": ["--lora", "false"]}.items():
            of = [losses(folder, of_amd, Path(place) / f"{name}-{of_amd}", *options) for of_amd in (True, False)]
            far = max(abs(a / b - 1) for a, b in zip(*of, strict=True))
            failed |= not far < MOST
            print(f"sft, {name}: {len(of[0])} losses, largest difference between rocm and cuda {far:.1e} of the loss")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
