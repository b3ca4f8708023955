"""The image: its file, what it installs, what it says of itself, and the commands of its last stage in a folder of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import REPOSITORY

IMAGE = REPOSITORY / "deploy/image"
REQUIREMENT = re.compile(r"^([\w-]+)==([\w.]+)((?: ;[^\\]*)?) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its arguments on one line."""
    lines = [line for line in (IMAGE / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", "")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = [[]]
    for name, rest in instructions():
        if name == "FROM":
            found.append([])
        found[-1].append((name, rest))
    return found[1:]


def test_bases_are_pinned_and_the_last_stage_has_no_compiler_and_no_root():
    bases = {rest for name, rest in instructions() if name == "ARG" and rest.startswith(("RUST", "PYTHON"))}
    assert len(bases) == 2 and all(re.search(r":\d+\.\d+\.\d+-slim-\w+$", base) for base in bases)
    build, install, last = stages()
    assert build[0][1] == "${RUST} AS build" and install[0][1] == "${PYTHON} AS install" and last[0][1] == "${PYTHON}"
    assert ("USER", "10001:10001") in last and ("ENTRYPOINT", '["surogate"]') in last
    after_user = [name for name, _ in last[last.index(("USER", "10001:10001")) :]]
    assert "RUN" not in after_user and "COPY" not in after_user
    assert not any(name == "ADD" for name, _ in instructions()), "nothing is fetched by address"
    assert not any(re.search(r"SECRET|TOKEN|PASSWORD", rest) for name, rest in instructions() if name in ("ENV", "ARG"))
    minimum = tomllib.loads((REPOSITORY / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
    assert any(f"rust:{minimum}." in base for base in bases)


def test_copied_files_are_there_and_commands_are_shell():
    ignore = (IMAGE / "Dockerfile.dockerignore").read_text().split()
    for name, rest in instructions():
        if name == "COPY" and not rest.startswith("--from"):
            for path in rest.split()[:-1]:
                for variant in ("cpu", "cuda"):
                    given = path.replace("${VARIANT}", variant)
                    assert (REPOSITORY / given).exists(), given
                    assert any(f"!{given}".startswith(line) for line in ignore if line.startswith("!")), given
        if name == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
            assert "apt-get install" not in rest or "rm -rf /var/lib/apt/lists" in rest


def test_commands_of_the_build_name_the_versions_of_the_project():
    requires = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["build-system"]["requires"]
    packaging = pytest.importorskip("packaging.requirements")
    (maturin,) = re.findall(r"maturin==(\S+)", (IMAGE / "Dockerfile").read_text())
    assert packaging.Requirement(requires[0]).specifier.contains(maturin)


@pytest.mark.parametrize(("variant", "extras"), [("cpu", ["cloud"]), ("cuda", ["cloud", "cuda"])])
def test_requirements_are_exact_have_digests_and_are_in_the_ranges_of_the_project(variant, extras):
    packaging = pytest.importorskip("packaging.requirements")
    text = (IMAGE / f"requirements-{variant}.txt").read_text()
    pinned = {match[1]: match[2] for match in REQUIREMENT.finditer(text)}
    assert REQUIREMENT.sub("", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)) == "", "each line is a version with its digests"
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    for line in wanted:
        of = packaging.Requirement(line)
        assert of.specifier.contains(pinned[of.name.replace("_", "-")]), line
    assert ("nvidia-cublas" in pinned) == (variant == "cuda")


def test_the_bill_of_materials_is_valid_and_has_every_crate_and_package(tmp_path):
    words = [sys.executable, str(IMAGE / "sbom.py"), str(REPOSITORY / "Cargo.lock")]
    first, second = (subprocess.run(words, check=True, capture_output=True, text=True).stdout for _ in range(2))
    assert first == second
    bill = json.loads(first)
    purls = [of["purl"] for of in bill["components"]]
    assert len(purls) == len(set(purls)) and any(purl.startswith("pkg:pypi/numpy@") for purl in purls)
    lock = tomllib.loads((REPOSITORY / "Cargo.lock").read_text())["package"]
    assert {f"pkg:cargo/{of['name']}@{of['version']}" for of in lock if "source" in of} <= {purl.replace("%2B", "+") for purl in purls}
    validation = pytest.importorskip("cyclonedx.validation.json")
    schema = pytest.importorskip("cyclonedx.schema")
    assert validation.JsonStrictValidator(schema.SchemaVersion.V1_6).validate_str(first) is None


def test_services_are_confined_and_run_the_commands_of_the_image():
    yaml = pytest.importorskip("yaml")
    from surogate.cli.arguments import parser

    services = yaml.safe_load((IMAGE / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
        words = [word for word in service["command"] if word not in ("--resume-from-checkpoint", "true")]
        assert parser().parse_args(words).command in ("sft", "serve")
    assert services["serve"]["ports"] == ["127.0.0.1:8000:8000"]


def test_the_command_writes_to_cache_and_work_alone(tmp_path):
    """The environment of the last stage, with its folders, on a home that cannot be written."""
    cache, work, home = (tmp_path / name for name in ("cache", "work", "home"))
    for folder in (cache, work, home):
        folder.mkdir()
    home.chmod(0o500)
    variables = dict(re.findall(r"(\w+)=(\S+)", next(rest for name, rest in stages()[2] if name == "ENV")))
    variables = {name: value.replace("/cache", str(cache)) for name, value in variables.items() if name != "PATH"}
    text = REPOSITORY / "examples/stories/data/shakespeare.txt"
    fields = {"model": str(REPOSITORY / "examples/stories/model"), "datasets": [{"path": str(text), "type": "text"}]}
    (work / "run.yaml").write_text(json.dumps({**fields, "sequence_len": 64, "max_steps": 2, "device": "cpu"}))
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH", "TMPDIR")}
    command = [sys.executable, "-m", "surogate", "sft", "run.yaml", "--resume-from-checkpoint", "true"]
    done = subprocess.run(command, cwd=work, env={**kept, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in work.iterdir()) == ["output", "run.yaml"]
    assert (cache / "surogate/rows").is_dir() and list(home.iterdir()) == []


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_the_first_process_of_a_container_ends_at_sigterm(tmp_path):
    """The system sends no signal without a handler to the first process of a container: a handler is there from the start."""
    program = "import os, signal, sys; from surogate.cli import commands; sys.argv = ['surogate', 'schema']\n"
    program += "commands.COMMANDS['schema'] = lambda *_: (os.kill(os.getpid(), signal.SIGTERM), signal.pause())\n"
    program += "sys.exit(commands.main())"
    words = ["unshare", "--user", "--pid", "--fork", "--map-root-user", sys.executable, "-c", program]
    if subprocess.run([*words[:5], "true"], capture_output=True).returncode:
        pytest.skip("namespaces of processes cannot be made here")
    assert subprocess.run(words, timeout=30).returncode == 143
