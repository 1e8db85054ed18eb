"""The files of examples/clusters: manifests are held against Kubernetes' schemas, the Dockerfile against hadolint."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make test installs kubernetes-validate")
yaml = pytest.importorskip("yaml", reason="kubernetes-validate installs it")

CLUSTERS = ROOT / "examples" / "clusters"
VERSION = "1.31"


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CLUSTERS / name).read_text()))


def differs_from_its_model(jobset: dict[str, Any]) -> bool:
    """Whether the model of a JobSet raises, or drops something: it takes unknown keys without a word."""
    # The import is here, since it takes seconds, and each process of a test run imports this file.
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="make test installs kubeflow-trainer-api")
    return models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict() != jobset


def test_the_indexed_job_is_valid():
    service, job = manifests("indexed-job.yaml")
    for each in (service, job):
        kubernetes_validate.validate(each, VERSION, strict=True)
    spec = job["spec"]["template"]["spec"]
    assert spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


def test_a_misspelt_key_of_a_job_is_noticed():
    _, job = manifests("indexed-job.yaml")
    job["spec"]["completionsMode"] = job["spec"].pop("completionMode")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSION, strict=True)


def test_the_jobset_is_valid():
    (jobset,) = manifests("jobset.yaml")
    assert not differs_from_its_model(jobset)
    wrong = copy.deepcopy(jobset)
    wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["completionsMode"] = "Indexed"
    assert differs_from_its_model(wrong)


def test_both_run_the_same_container():
    (_, job), (jobset,) = manifests("indexed-job.yaml"), manifests("jobset.yaml")
    mine, theirs = (
        spec["template"]["spec"]["containers"][0]
        for spec in (job["spec"], jobset["spec"]["replicatedJobs"][0]["template"]["spec"])
    )
    address = theirs["args"][0].replace("train-ranks-0-0.train", "train-0.train")
    assert {**theirs, "args": [address]} == mine


def test_the_dockerfile_is_linted(tmp_path):
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("no hadolint: make test installs it")
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /tmp\n")
    for dockerfile, code in ((CLUSTERS / "Dockerfile", 0), (tmp_path / "Dockerfile", 1)):
        done = subprocess.run([hadolint, "--no-color", dockerfile], capture_output=True, text=True)
        assert done.returncode == code, done.stdout


def test_the_batch_script_is_one():
    subprocess.run(["bash", "-n", CLUSTERS / "train.sbatch"], check=True)
    assert "srun" in (CLUSTERS / "train.sbatch").read_text()
