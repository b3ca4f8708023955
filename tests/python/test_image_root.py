"""The image without a registry of images: the stages of its Dockerfile run in root file systems of Debian's packages, and its command
trains and serves there as the image's user on a root that is read-only.

The base of the first stage is stood in for by a compiler of C and by the toolchain of Rust of this machine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
import urllib.request
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from test_image import IMAGE, stages

pytestmark = [
    pytest.mark.long,
    pytest.mark.xdist_group("image"),
    pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="mmdebstrap is not installed (apt-get install mmdebstrap)"),
    pytest.mark.skipif(shutil.which("rustc") is None, reason="the stage that compiles takes the Rust toolchain of the host"),
    pytest.mark.skipif(os.geteuid() != 0, reason="root file systems are made and entered as root"),
]

#: The release of Debian that the image's bases are of, with what is in the one of Rust besides Rust.
OF_BUILD = "bookworm", "gcc,libc6-dev,ca-certificates"

#: A release of Debian whose Python is not older than that of the image.
OF_PYTHON = "trixie", "python3,python3-venv,python-is-python3,ca-certificates"

#: Files of this machine by which programs reach the network.
OF_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")

#: Most megabytes of what the image adds to its base, as files and packed.
MOST = {"cpu": (200, 75), "cuda": (2500, 1600)}


class Root:
    """A root file system with what the instructions of a stage have made of it."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        self.variables = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy") or name == "PIP_CERT"}
        self.variables |= {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", **variables}
        self.user, self.place, self.entry = "0:0", "/", []  # type: ignore[var-annotated]

    def follow(self, stage: list[tuple[str, str]], context: Path, others: Mapping[str, Path], arguments: Mapping[str, str]) -> None:
        """Carries the instructions of a stage out, `FROM` left out. `others`: the roots of other stages."""
        arguments = dict(arguments)
        for name, rest in stage[1:]:
            for variable, value in {**arguments, **self.variables}.items():
                rest = rest.replace(f"${{{variable}}}", value).replace(f"${variable}", value)
            if name == "ARG":
                variable, _, value = rest.partition("=")
                arguments.setdefault(variable, value)
            elif name == "ENV":
                self.variables |= dict(word.split("=", 1) for word in shlex.split(rest))
            elif name == "COPY":
                *sources, target = rest.split()
                of = sources.pop(0).removeprefix("--from=") if sources[0].startswith("--") else ""
                for source in sources:
                    to = self.inside(target) / (Path(source).name if target.endswith("/") else "")
                    subprocess.run(["cp", "-aT", (others[of] if of else context) / source.lstrip("/"), to], check=True)
            elif name == "RUN":
                self.run("sh", "-c", rest)
            elif name == "USER":
                self.user = rest
            elif name == "WORKDIR":
                self.place = rest
                self.inside(rest).mkdir(parents=True, exist_ok=True)
            elif name == "ENTRYPOINT":
                self.entry = json.loads(rest)
            else:
                assert name in ("VOLUME", "EXPOSE", "CMD"), name

    def inside(self, path: str) -> Path:
        """The place of a path of this root."""
        return self.folder / os.path.join(self.place, path).lstrip("/")

    def words(self, words: tuple[str, ...], mounts: dict[str, Path] | None = None) -> list[str]:
        """The line of a command in this root, which is read-only where `mounts` says which folders are not."""
        root = shlex.quote(str(self.folder))
        lines = [f"mount --bind {root} {root}"]
        if mounts is not None:
            lines += [f"mount -o remount,bind,ro {root}"]
            lines += [f"mount --bind {shlex.quote(str(of))} {root}{place}" for place, of in mounts.items()]
        lines += [f"mount --rbind /{of} {root}/{of}" for of in ("proc", "dev")]
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        inside = f"cd {self.place} && exec {shlex.join(words)}"
        enter = ["chroot", f"--userspec={self.user}", str(self.folder), "/usr/bin/env", "-i", *variables, "sh", "-c", inside]
        return ["unshare", "--mount", "sh", "-ec", "\n".join([*lines, f"exec {shlex.join(enter)}"])]

    def run(self, *words: str, mounts: dict[str, Path] | None = None) -> str:
        done = subprocess.run(self.words(words, mounts), capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout


def debian(release: tuple[str, str], folder: Path) -> None:
    """Makes a root file system of a release with packages."""
    suite, packages = release
    words = ["mmdebstrap", "--variant=minbase", f"--include={packages}", suite, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode and "Temporary failure resolving" in done.stderr:
        pytest.skip("no way to Debian's packages")
    assert done.returncode == 0, done.stderr


def connect(root: Path) -> None:
    """Gives a root file system the network of this machine."""
    for path in filter(os.path.exists, OF_NETWORK):
        shutil.copy(path, f"{root}{path}")


def bring_rust(root: Path) -> None:
    """Copies what the image of Rust has of its toolchain, and where this machine's cargo finds crates."""
    of = Path(subprocess.run(["rustc", "--print", "sysroot"], check=True, capture_output=True, text=True).stdout.strip())
    home = root / "usr/local/cargo"
    (home / "bin").mkdir(parents=True)
    for program in ("cargo", "rustc"):
        shutil.copy(of / "bin" / program, home / "bin")
    shutil.copytree(of / "lib", home / "lib", symlinks=True)
    settings = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo")) / "config.toml"
    if settings.exists():
        shutil.copy(settings, home)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("roots")


@pytest.fixture(scope="module")
def context(place) -> Path:
    """The files that a build of the image sees."""
    everything, *lines = (IMAGE / "Dockerfile.dockerignore").read_text().split()
    assert everything == "*"
    ignored = shutil.ignore_patterns(*(line.removeprefix("**/") for line in lines if line.startswith("**/")))
    for path in (line.removeprefix("!") for line in lines if line.startswith("!")):
        source, to = REPOSITORY / path, place / "context" / path
        to.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, to, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, to)
    return place / "context"


@pytest.fixture(scope="module")
def build(place, context) -> Root:
    """The stage that compiles the wheel."""
    debian(OF_BUILD, place / "build")
    connect(place / "build")
    bring_rust(place / "build")
    home = "/usr/local/cargo"
    root = Root(place / "build", CARGO_HOME=home, PATH=f"{home}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    started = time.monotonic()
    root.follow(stages()[0], context, {}, {})
    print(f"build: {time.monotonic() - started:.0f} s with {root.run('rustc', '--version').strip()}")
    return root


@pytest.fixture(scope="module")
def base(place) -> Path:
    debian(OF_PYTHON, place / "base")
    return place / "base"


@pytest.fixture(scope="module", params=list(MOST))
def variant(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def image(variant, place, context, build, base) -> Root:
    """The last stage of a variant, of what the others give it."""
    install, last = (Root(place / f"{name}-{variant}") for name in ("install", "last"))
    for root in (install, last):
        subprocess.run(["cp", "-a", "--reflink=auto", base, root.folder], check=True)
    connect(install.folder)
    _, of_install, of_last = stages()
    started = time.monotonic()
    install.follow(of_install, context, {"build": build.folder}, {"VARIANT": variant})
    print(f"{variant}: installed in {time.monotonic() - started:.0f} s")
    last.follow(of_last, context, {"install": install.folder}, {})
    shutil.rmtree(install.folder)
    return last


@pytest.fixture
def mounts(tmp_path) -> dict[str, Path]:
    """Folders for the volumes of the image, its user's."""
    found = {f"/{name}": tmp_path / name for name in ("cache", "work")}
    for folder in found.values():
        folder.mkdir()
    shutil.copytree(REPOSITORY / "examples/stories", found["/work"] / "stories")
    fields = {"model": "stories/model", "datasets": [{"path": "stories/data/shakespeare.txt", "type": "text"}], "device": "cpu"}
    fields |= {"sequence_len": 64, "max_steps": 2, "output_dir": "output"}
    (found["/work"] / "run.yaml").write_text(json.dumps(fields))
    subprocess.run(["chown", "-R", "10001:10001", *found.values()], check=True)
    return found


def findings(image: Root, mounts: dict[str, Path]) -> dict[str, Any]:
    return json.loads(image.run(*image.entry, "doctor", "--json", mounts=mounts))


def test_the_wheel_is_built_without_anything_of_the_checkout(build):
    (wheel,) = (build.folder / "wheels").iterdir()
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    assert re.fullmatch(r"surogate-[\d.]+-cp311-abi3-manylinux_2_\d+_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith(".so")] == ["surogate/_native.abi3.so"]
    assert not any("__pycache__" in name for name in names)
    assert {"LICENSE", "THIRD_PARTY_NOTICES.txt"} <= {Path(name).name for name in names}


def test_the_image_has_its_packages_and_no_more_than_it_says(image, variant):
    own = image.folder / "opt/surogate"
    files = [path for path in own.rglob("*") if not path.is_symlink() and path.is_file()]
    size = sum(path.stat().st_size for path in files)
    of_nvidia = sum(path.stat().st_size for path in files if "nvidia" in path.parts)
    packed = int(subprocess.check_output(f"tar -C {shlex.quote(str(own))} -c . | gzip -6 | wc -c", shell=True))
    megabytes = [round(of / 1e6) for of in (size, packed)]
    print(f"{variant}: {megabytes[0]} MB, packed {megabytes[1]} MB; libraries of NVIDIA {of_nvidia / 1e6:.0f} MB")
    assert all(of <= most for of, most in zip(megabytes, MOST[variant], strict=True)), megabytes
    bill = json.loads((own / "sbom.json").read_text())
    purls = [of["purl"] for of in bill["components"]]
    for name in ("surogate", "numpy", "huggingface-hub"):
        assert any(purl.startswith(f"pkg:pypi/{name}@") for purl in purls), name
    assert not any(purl.startswith("pkg:pypi/pip@") for purl in purls)
    assert any(purl.startswith("pkg:pypi/nvidia-cublas@") for purl in purls) == (variant == "cuda")
    found = image.run("sh", "-c", "command -v gcc cc cargo pip git || true")
    assert found == "", found


def test_the_bill_of_the_image_is_valid(image):
    validation = pytest.importorskip("cyclonedx.validation.json")
    schema = pytest.importorskip("cyclonedx.schema")
    text = (image.folder / "opt/surogate/sbom.json").read_text()
    assert validation.JsonStrictValidator(schema.SchemaVersion.V1_6).validate_str(text) is None


def test_libraries_of_cuda_are_found_in_its_variant_and_a_driver_in_none(image, variant, mounts):
    libraries = {of["library"]: of for of in findings(image, mounts)["libraries"] if of["vendor"] == "NVIDIA"}
    assert {name for name, of in libraries.items() if of["found"]} == (
        {"nvrtc", "cublaslt", "cudnn", "nccl"} if variant == "cuda" else set()
    )
    for of in (of for of in libraries.values() if of["found"]):
        print(f"{of['title']} {of['version']}: {of['path']}")
        assert of["origin"] == "pip wheel" and of["path"].startswith("/opt/surogate/")


def test_libraries_of_cuda_lack_no_library_but_the_driver(image, variant):
    lacking = "find /opt/surogate -name '*.so*' -path '*nvidia*' -exec ldd {} + 2> /dev/null | grep 'not found' || true"
    found = {line.split()[0] for line in image.run("sh", "-c", lacking).splitlines()}
    assert found == ({"libcuda.so.1"} if variant == "cuda" else set())


def test_the_default_device_without_a_driver_is_the_cpu(image, mounts):
    assert findings(image, mounts)["device"] == "cpu"
    assert "Default device: cpu" in image.run(*image.entry, "doctor", mounts=mounts)
    assert image.run(*image.entry, "--version", mounts=mounts).startswith("surogate ")


def test_a_run_and_its_result_need_only_the_volumes(image, mounts):
    assert image.run("id", "-u", mounts=mounts) == "10001\n"
    refused = subprocess.run(image.words(("touch", "/opt/x"), mounts), capture_output=True, text=True)
    assert refused.returncode != 0 and "Read-only file system" in refused.stderr
    image.run(*image.entry, "sft", "run.yaml", "--resume-from-checkpoint", "true", mounts=mounts)
    assert (mounts["/work"] / "output/adapter/adapter_model.safetensors").is_file()
    text = image.run(*image.entry, "generate", "output", "--prompt", "Once upon a time", "--max-new-tokens", "8", mounts=mounts)
    assert len(text.split()) >= 4


def test_the_server_answers_and_ends_with_its_container(image, mounts):
    words = (*image.entry, "serve", "stories/model", "--address", "127.0.0.1:0", "--device", "cpu")
    process = subprocess.Popen(image.words(words, mounts), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        address = process.stdout.readline().partition(" at ")[2].split()[0]
        with urllib.request.urlopen(f"{address}/models") as answer:
            assert json.load(answer)["data"][0]["id"] == "model"
    finally:
        process.terminate()
        assert process.wait(30) == 0
