"""Files for clusters: each is valid by the schema of its project, and its command starts the nodes that it says.

The schemas are in `tests/crds/schemas.json`, with their sources and licenses; `collect.py` next to it makes them.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from surogate import _native
from surogate.cli.commands import EXIT_CODES

yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")

DEPLOY = REPOSITORY / "deploy"
SCHEMAS = json.loads((REPOSITORY / "tests/crds/schemas.json").read_text())
MODEL = str(REPOSITORY / "examples" / "stories" / "model")

#: Files that are no resources of Kubernetes, or checked by a test of their own.
OTHERS = {"image/compose.yaml", "job/run.yaml", "skypilot.yaml"}

#: Kinds of Kubernetes and kustomize, whose fields are few.
PLAIN = {"v1 Service", "kustomize.config.k8s.io/v1beta1 Kustomization"}


def documents() -> list[Any]:
    files = [path for path in sorted(DEPLOY.rglob("*.yaml")) if str(path.relative_to(DEPLOY)) not in OTHERS]
    return [
        pytest.param(path, of, id=f"{path.relative_to(DEPLOY)}-{of['kind']}")
        for path in files
        for of in yaml.safe_load_all(path.read_text())
    ]


def kind_of(document: dict[str, Any]) -> str:
    return f"{document['apiVersion']} {document['kind']}"


def problems(document: dict[str, Any]) -> list[str]:
    schema = {**SCHEMAS["kinds"][kind_of(document)], "definitions": SCHEMAS["definitions"]}
    found = jsonschema.Draft7Validator(schema).iter_errors(document)
    return [f"{'.'.join(map(str, of.absolute_path))}: {of.message}" for of in found]


@pytest.mark.parametrize(("path", "document"), documents())
def test_files_are_valid_by_the_schema_of_their_project(path, document):
    if kind_of(document) in PLAIN:
        assert document["apiVersion"] == "v1" or set(document) <= {
            "apiVersion", "kind", "resources", "configMapGenerator", "images", "patches",
        }  # fmt: skip
    else:
        assert problems(document) == []


def load(name: str, kind: str) -> dict[str, Any]:
    (found,) = [of for of in yaml.safe_load_all((DEPLOY / name).read_text()) if of["kind"] == kind]
    return found


def test_the_schemas_find_what_is_wrong():
    job = load("job/job.yaml", "Job")
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = ["x"]
    job["spec"]["completions"] = "two"
    found = problems(job)
    assert len(found) == 2 and any("comand" in text for text in found) and any("completions" in text for text in found)
    assert {of["license"] for of in SCHEMAS["sources"]} == {"Apache-2.0"} and all(of["commit"] for of in SCHEMAS["sources"])


def given(words: list[str]) -> list[tuple[str, str]]:
    """The options of a command line, loaded with the model of the examples."""
    pairs = [tuple(word.removeprefix("--set=").split("=", 1)) for word in words if word.startswith("--set=")]
    _native.Config.from_json(json.dumps({"model": MODEL}), "sft", [*pairs, ("gpus", "1")])
    return pairs


def test_nodes_of_an_indexed_job_meet_at_the_name_of_the_first():
    service, job = load("job/service.yaml", "Service"), load("job/job.yaml", "Job")["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"]
    name = load("job/job.yaml", "Job")["metadata"]["name"]
    assert service["metadata"]["name"] == job["template"]["spec"]["subdomain"]
    assert service["spec"]["selector"] == {"job-name": name}
    options = given(container["args"])
    assert ("distributed.num_nodes", str(job["completions"])) in options
    assert ("distributed.rendezvous", f"{name}-0.{service['metadata']['name']}:29400") in options


def test_nodes_of_a_jobset_meet_at_the_name_of_the_first():
    whole = load("jobset.yaml", "JobSet")
    (of,) = whole["spec"]["replicatedJobs"]
    job = of["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    options = given(container["args"])
    name = whole["metadata"]["name"]
    assert ("distributed.num_nodes", str(job["completions"])) in options
    assert ("distributed.rendezvous", f"{name}-{of['name']}-0-0.{name}:29400") in options


def test_nodes_of_a_trainjob_read_the_variables_of_the_torch_policy():
    runtime, trainjob = load("kubeflow.yaml", "ClusterTrainingRuntime"), load("kubeflow.yaml", "TrainJob")
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] and "torch" in runtime["spec"]["mlPolicy"]
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # The controller changes the container of this name, in the job with this label.
    assert job["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert job["name"] == container["name"] == "node"
    values = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "stories-node-0-0.stories", "PET_MASTER_PORT": "29400"}
    words = [re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], word) for word in container["args"]]
    assert ("distributed.rendezvous", "stories-node-0-0.stories:29400") in given(words)


def test_a_rayjob_asks_for_as_many_workers_as_nodes():
    of_ray = load("rayjob.yaml", "RayJob")["spec"]
    (workers,) = of_ray["rayClusterSpec"]["workerGroupSpecs"]
    words = shlex.split(shlex.split(of_ray["entrypoint"])[2])
    options = given(words)
    assert ("distributed.num_nodes", str(workers["replicas"])) in options
    assert '"on_ray":true' in _native.Config.from_json(json.dumps({"model": MODEL}), "sft", options).nodes


def policies() -> list[dict[str, Any]]:
    (of_runtime,) = load("kubeflow.yaml", "ClusterTrainingRuntime")["spec"]["template"]["spec"]["replicatedJobs"]
    (of_set,) = load("jobset.yaml", "JobSet")["spec"]["replicatedJobs"]
    return [load("job/job.yaml", "Job")["spec"], of_runtime["template"]["spec"], of_set["template"]["spec"]]


@pytest.mark.parametrize("spec", policies())
def test_a_pod_failure_policy_gives_up_where_starting_again_cannot_help(spec):
    (fails,) = [rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    lost = {code for kind, code in EXIT_CODES if kind.__name__ in ("NodeLostError", "SurogateError")}
    expected = {code for _, code in EXIT_CODES} - lost
    assert set(fails["onExitCodes"]["values"]) == expected == {2, 3, 4, 5}
    assert fails["onExitCodes"]["containerName"] == spec["template"]["spec"]["containers"][0]["name"]
    page = (REPOSITORY / "docs/errors.md").read_text()
    assert all(f"| {code}" in page for code in [*expected, *lost, 130])


def test_a_signal_is_not_counted_and_what_is_wrong_fails_a_jobset():
    for spec in policies()[:2]:
        ignored = [rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
        assert ignored[1:] == [[138, 143]]
    (rule,) = load("jobset.yaml", "JobSet")["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


@pytest.mark.parametrize("name", ["jobset.yaml", "kubeflow.yaml"])
def test_a_file_says_where_its_configuration_comes_from(name):
    """kustomize makes that of the Job, under a name of its own."""
    text = (DEPLOY / name).read_text()
    (volume,) = set(re.findall(r"configMap:\s+name: (\S+)", text))
    (made, path) = re.search(r"kubectl create configmap (\S+) --from-file=(\S+)", text).groups()
    assert volume == made and (REPOSITORY / path).is_file()


def test_a_pod_leaves_more_time_than_the_run_takes_to_end():
    run = yaml.safe_load((DEPLOY / "job/run.yaml").read_text())
    grace = load("job/job.yaml", "Job")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert run["save_grace_seconds"] < grace and run["resume_from_checkpoint"] is True
    _native.Config.from_yaml((DEPLOY / "job/run.yaml").read_text(), "run.yaml", "sft", [])


def test_the_base_names_files_that_are_there_and_an_overlay_a_resource_of_it():
    for name in ("job", "queued"):
        of = yaml.safe_load((DEPLOY / name / "kustomization.yaml").read_text())
        assert all((DEPLOY / name / path).exists() for path in of["resources"])
    base = yaml.safe_load((DEPLOY / "job/kustomization.yaml").read_text())
    (generated,) = base["configMapGenerator"]
    volumes = load("job/job.yaml", "Job")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "run", "configMap": {"name": generated["name"]}} in volumes
    (patch,) = of["patches"]
    target = load("job/job.yaml", "Job")
    assert (patch["target"]["kind"], patch["target"]["name"]) == (target["kind"], target["metadata"]["name"])
    queue = load("kueue.yaml", "LocalQueue")
    assert {"kueue.x-k8s.io/queue-name": queue["metadata"]["name"]} in [of["value"] for of in yaml.safe_load(patch["patch"])]
    assert queue["spec"]["clusterQueue"] == load("kueue.yaml", "ClusterQueue")["metadata"]["name"]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("kustomize") is None, reason="kustomize is not installed")
@pytest.mark.parametrize("name", ["job", "queued"])
def test_kustomize_builds_valid_resources(name):
    built = subprocess.run(["kustomize", "build", str(DEPLOY / name)], check=True, capture_output=True, text=True).stdout
    (job,) = [of for of in yaml.safe_load_all(built) if of["kind"] == "Job"]
    assert problems(job) == [] and job["spec"].get("suspend", False) == (name == "queued")


def script(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_the_file_of_skypilot_starts_a_node_on_each_machine():
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    assert set(task) <= {"name", "num_nodes", "resources", "workdir", "envs", "setup", "run"}
    script(task["setup"])
    script(task["run"])
    for variable in ("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"):
        assert f"${variable}" in task["run"]
    assert task["num_nodes"] > 1 and "nvidia-nccl-cu13" in task["setup"], "nodes of GPUs need NCCL"
    (path,) = re.findall(r"surogate sft (\S+)", task["run"])
    assert (REPOSITORY / path).is_file()


def test_the_script_of_slurm_saves_before_its_time_ends_and_goes_on_afterwards(tmp_path):
    text = (DEPLOY / "train.slurm").read_text()
    script(text)
    assert "--ntasks-per-node=1" in text and "distributed.num_nodes=$SLURM_NNODES" in text
    (before,), (grace,) = re.findall(r"--signal=USR1@(\d+)", text), re.findall(r"save_grace_seconds=(\d+)", text)
    assert int(grace) < int(before)
    # Node 0 uploads its checkpoint after the other nodes have ended with the code of the signal.
    assert "--kill-on-bad-exit=0" in text
    for name, code in (("srun", 138), ("scontrol", 0), ("openssl", 0)):
        stand_in = tmp_path / name
        stand_in.write_text(f'#!/bin/sh\necho "{name} $@" >> {tmp_path}/called\nexit {code}\n')
        stand_in.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", str(DEPLOY / "train.slurm")], env=variables)
    called = Path(tmp_path, "called").read_text()
    assert done.returncode == 138 and "scontrol requeue 7" in called and "--resume-from-checkpoint true" in called
