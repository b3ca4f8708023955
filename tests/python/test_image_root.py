"""The image without a registry of images: the last two stages of its Dockerfile run in root file systems of Debian's packages, and its
command trains and serves there as the image's user on a root that is read-only.

Of the first stage, which compiles, the wheel is taken that the tests themselves run.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from test_image import stages

pytestmark = [
    pytest.mark.long,
    pytest.mark.xdist_group("image"),
    pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="mmdebstrap is not installed (apt-get install mmdebstrap)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="root file systems are made and entered as root"),
]

#: A release of Debian whose Python is not older than that of the image.
SUITE, PACKAGES = "trixie", "python3,python3-venv,python-is-python3,ca-certificates"

#: Files of the host by which programs reach the network.
OF_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")

#: Most megabytes of what the image adds to its base, without libraries of CUDA, as files and packed.
MOST, MOST_PACKED = 200, 75


class Root:
    """A root file system with what the instructions of a stage have made of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy") or name == "PIP_CERT"}
        self.variables |= {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
        self.user, self.place, self.entry = "0:0", "/", []  # type: ignore[var-annotated]

    def follow(self, stage: list[tuple[str, str]], others: dict[str, Path]) -> None:
        """Carries the instructions of a stage out, `FROM` left out. `others`: the roots of other stages."""
        given: dict[str, str] = {}
        for name, rest in stage[1:]:
            for variable, value in {**given, **self.variables}.items():
                rest = rest.replace(f"${{{variable}}}", value).replace(f"${variable}", value)
            if name == "ARG":
                variable, _, value = rest.partition("=")
                given[variable] = value
            elif name == "ENV":
                self.variables |= dict(word.split("=", 1) for word in shlex.split(rest))
            elif name == "COPY":
                *options, source, target = rest.split()
                base = others[options[0].removeprefix("--from=")] if options else REPOSITORY
                subprocess.run(["cp", "-aT", f"{base}/{source.lstrip('/')}", f"{self.folder}{target}"], check=True)
            elif name == "RUN":
                self.run("sh", "-c", rest)
            elif name == "USER":
                self.user = rest
            elif name == "WORKDIR":
                self.place = rest
            elif name == "ENTRYPOINT":
                self.entry = json.loads(rest)
            else:
                assert name in ("VOLUME", "EXPOSE", "CMD"), name

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


def repacked(folder: Path) -> None:
    """Writes the wheel that is installed here into a folder."""
    try:
        of = importlib.metadata.distribution("surogate")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("surogate is not installed from a wheel")
    tag = next(line.split()[1] for line in (of.read_text("WHEEL") or "").splitlines() if line.startswith("Tag: "))
    folder.mkdir()
    with zipfile.ZipFile(folder / f"surogate-{of.version}-{tag}.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in of.files or []:
            if ".." not in file.parts and file.suffix != ".pyc" and file.name not in ("INSTALLER", "direct_url.json", "REQUESTED"):
                wheel.write(str(file.locate()), str(file))


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> dict[str, Any]:
    """The root of each stage, with the build's stood in for by its wheel."""
    place = tmp_path_factory.mktemp("roots")
    words = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(place / "base")]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode and "Temporary failure resolving" in done.stderr:
        pytest.skip("no way to Debian's packages")
    assert done.returncode == 0, done.stderr
    (place / "build").mkdir()
    repacked(place / "build/wheels")
    for name in ("install", "last"):
        subprocess.run(["cp", "-a", "--reflink=auto", place / "base", place / name], check=True)
    for path in filter(os.path.exists, OF_NETWORK):
        shutil.copy(path, f"{place / 'install'}{path}")
    _, of_install, of_last = stages()
    install, last = Root(place / "install"), Root(place / "last")
    install.follow(of_install, {"build": place / "build"})
    last.follow(of_last, {"install": install.folder})
    return {"install": install, "last": last}


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


def test_the_image_has_its_packages_and_no_more_than_it_says(roots):
    last = roots["last"]
    own = last.folder / "opt/surogate"
    size = sum(path.lstat().st_size for path in own.rglob("*"))
    packed = subprocess.run(["tar", "-C", own, "-c", "."], check=True, capture_output=True).stdout
    megabytes = [round(of / 1e6) for of in (size, len(gzip.compress(packed, 6)))]
    print(f"/opt/surogate: {megabytes[0]} MB, packed {megabytes[1]} MB")
    assert megabytes[0] <= MOST and megabytes[1] <= MOST_PACKED, megabytes
    bill = json.loads((own / "sbom.json").read_text())
    purls = [of["purl"] for of in bill["components"]]
    for name in ("surogate", "numpy", "huggingface-hub"):
        assert any(purl.startswith(f"pkg:pypi/{name}@") for purl in purls), name
    assert not any(purl.startswith("pkg:pypi/pip@") for purl in purls)
    found = last.run("sh", "-c", "command -v gcc cc cargo pip git || true")
    assert found == "", found


def test_a_run_and_its_result_need_only_the_volumes(roots, mounts):
    last = roots["last"]
    assert last.run("id", "-u", mounts=mounts) == "10001\n"
    refused = subprocess.run(last.words(("touch", "/opt/x"), mounts), capture_output=True, text=True)
    assert refused.returncode != 0 and "Read-only file system" in refused.stderr
    last.run(*last.entry, "sft", "run.yaml", "--resume-from-checkpoint", "true", mounts=mounts)
    assert (mounts["/work"] / "output/adapter/adapter_model.safetensors").is_file()
    text = last.run(*last.entry, "generate", "output", "--prompt", "Once upon a time", "--max-new-tokens", "8", mounts=mounts)
    assert len(text.split()) >= 4


def test_the_server_answers_and_ends_with_its_container(roots, mounts):
    last = roots["last"]
    words = (*last.entry, "serve", "stories/model", "--address", "127.0.0.1:0", "--device", "cpu")
    process = subprocess.Popen(last.words(words, mounts), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        address = process.stdout.readline().partition(" at ")[2].split()[0]
        with urllib.request.urlopen(f"{address}/models") as answer:
            assert json.load(answer)["data"][0]["id"] == "model"
    finally:
        process.terminate()
        assert process.wait(30) == 0
