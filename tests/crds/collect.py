"""Collects the schemas that `tests/python/test_deploy.py` checks files by: `python collect.py MIRRORS > schemas.json`.

MIRRORS is a folder with a bare clone of each project as `OWNER+NAME/repo`. Descriptions are left out, objects with a
list of fields take no others (as servers prune or refuse them), and what occurs several times is stored once.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

CRDS = [
    ("kubeflow/trainer", "manifests/base/crds/trainer.kubeflow.org_clustertrainingruntimes.yaml"),
    ("kubeflow/trainer", "manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml"),
    ("kubernetes-sigs/jobset", "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"),
    ("kubernetes-sigs/kueue", "config/components/crd/bases/kueue.x-k8s.io_clusterqueues.yaml"),
    ("kubernetes-sigs/kueue", "config/components/crd/bases/kueue.x-k8s.io_localqueues.yaml"),
    ("kubernetes-sigs/kueue", "config/components/crd/bases/kueue.x-k8s.io_resourceflavors.yaml"),
    ("ray-project/kuberay", "ray-operator/config/crd/bases/ray.io_rayjobs.yaml"),
]

#: Fields of a schema that say nothing about what is valid, and rules in a language of the server.
DROPPED = ("description", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type", "default", "format")
DROPPED += ("x-kubernetes-validations",)

#: Bytes of a part that is worth a name.
LEAST = 200


def git(mirrors: Path, repository: str, *words: str) -> str:
    place = mirrors / repository.replace("/", "+") / "repo"
    return subprocess.run(["git", "-C", str(place), *words], check=True, capture_output=True, text=True).stdout


def tightened(of: Any, is_fields: bool = False) -> Any:
    """A schema in JSON Schema's words. In `properties` every name is a field of the user's."""
    if isinstance(of, list):
        return [tightened(part) for part in of]
    if not isinstance(of, dict):
        return of
    found = {name: tightened(part, name == "properties") for name, part in of.items() if is_fields or name not in DROPPED}
    if is_fields:
        return found
    if found.pop("x-kubernetes-int-or-string", False):
        found.pop("anyOf", None)
        found["type"] = ["integer", "string"]
    keeps = found.pop("x-kubernetes-preserve-unknown-fields", False)
    if "properties" in found and not keeps and "additionalProperties" not in found:
        found["additionalProperties"] = False
    if found.pop("nullable", False) and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
    return found


def shared(schemas: dict[str, Any]) -> dict[str, Any]:
    """The same with `definitions` for what occurs several times."""
    counts: Counter[str] = Counter()

    def key(of: Any) -> str:
        return json.dumps(of, sort_keys=True)

    def count(of: Any) -> None:
        if isinstance(of, dict):
            text = key(of)
            if "type" in of and len(text) >= LEAST:
                counts[text] += 1
                if counts[text] > 1:
                    return
            for part in of.values():
                count(part)
        elif isinstance(of, list):
            for part in of:
                count(part)

    count(schemas)
    definitions: dict[str, Any] = {}

    def named(of: Any) -> Any:
        if isinstance(of, dict):
            text = key(of)
            inner = lambda: {name: named(part) for name, part in of.items()}  # noqa: E731
            if counts[text] > 1:
                name = hashlib.sha256(text.encode()).hexdigest()[:8]
                if name not in definitions:
                    definitions[name] = inner()
                return {"$ref": f"#/definitions/{name}"}
            return inner()
        return [named(part) for part in of] if isinstance(of, list) else of

    kinds = {kind: named(schema) for kind, schema in schemas.items()}
    return {"kinds": kinds, "definitions": definitions}


def main() -> None:
    mirrors = Path(sys.argv[1])
    schemas, sources = {}, []
    for repository, path in CRDS:
        commit = git(mirrors, repository, "rev-parse", "HEAD").strip()
        crd = yaml.safe_load(git(mirrors, repository, "show", f"HEAD:{path}"))["spec"]
        sources.append({"repository": repository, "path": path, "commit": commit, "license": "Apache-2.0"})
        for version in crd["versions"]:
            if version["served"]:
                schema = tightened(version["schema"]["openAPIV3Schema"])
                # A status is the controller's, and the server itself checks the metadata.
                schema["properties"].pop("status", None)
                schema["properties"]["metadata"] = {"type": "object"}
                schemas[f"{crd['group']}/{version['name']} {crd['names']['kind']}"] = schema
    jobs = schemas["jobset.x-k8s.io/v1alpha2 JobSet"]["properties"]["spec"]["properties"]["replicatedJobs"]
    job = jobs["items"]["properties"]["template"]["properties"]["spec"]
    # The specification of a Job, as JobSet's schema repeats it from Kubernetes.
    schemas["batch/v1 Job"] = {
        "type": "object",
        "additionalProperties": False,
        "required": ["spec"],
        "properties": {**dict.fromkeys(("apiVersion", "kind"), {"type": "string"}), "metadata": {"type": "object"}, "spec": job},
    }
    print(json.dumps({"sources": sources, **shared(schemas)}, separators=(",", ":"), sort_keys=True))


if __name__ == "__main__":
    main()
