"""What `submit --on kubernetes` prints and applies: golden files, the schemas of Kubernetes, and bad input."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
from kubernetes_kit import request

from taskgraph.cli import parser
from taskgraph.clusters.kubernetes.manifests import manifest_text, manifests, secret
from taskgraph.clusters.kubernetes.options import object_name
from taskgraph.errors import JobError

yaml = pytest.importorskip("yaml")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FULL = (
    "--image registry.example/fit:1 --workdir /srv/fit --namespace team --cpu 4 --memory 8Gi --gpus 1 --queue team "
    "--priority-class high --node-selector pool=fast --toleration spot:NoSchedule --volume data:/data "
    "--volume empty:/scratch --env MODE=fast --result /data/result.json"
)


def full() -> Any:
    return request(
        FULL,
        words=("-o", "epochs=100", "--min-nodes", "2"),
        extra_nodes=6,
        extra_priority="low",
        etcd="etcd-0.etcd:2379,etcd-1.etcd:2379,etcd-2.etcd:2379",
        etcd_access={"ca": "/home/me/etcd/ca.pem", "username": "fit", "password": "secret word"},
        token_file="fit.token",
    )


def of(found: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    (one,) = (each for each in found if each["kind"] == kind and name in ("", each["metadata"]["name"]))
    return one


@pytest.mark.parametrize(("name", "namespace"), [("plain", ""), ("full", "team")])
def test_printed_yaml_is_the_golden_one(name: str, namespace: str) -> None:
    made = request() if name == "plain" else full()
    text = manifest_text(made, namespace)
    golden = HERE / f"kubernetes_{name}.yaml"
    if not golden.exists():  # delete the file to write it anew
        golden.write_text(text)
    assert text == golden.read_text()
    assert list(yaml.safe_load_all(text)) == manifests(made, namespace)


def test_no_secret_is_printed() -> None:
    text = manifest_text(full(), "team")
    assert "secret word" not in text
    assert "kind: Secret" not in text
    assert "kubectl create secret generic fit --namespace team" in text


def test_secret_has_token_certificates_and_access_to_etcd(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("authority")
    access = {"ca": str(tmp_path / "ca.pem"), "username": "fit", "password": "word"}
    made = secret(request(token="ab" * 32, etcd_access=access), "team", {"cert.pem": b"certificate"})
    data = {name: base64.b64decode(value).decode() for name, value in made["data"].items()}
    assert data == {
        "token": f"{'ab' * 32}\n",
        "cert.pem": "certificate",
        "etcd-ca.pem": "authority",
        "etcd-password": "word",
    }


def test_node_leaves_in_more_time_than_it_may_drain() -> None:
    pod = of(manifests(request(drain_s=200.5)), "Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 200.5


def test_memory_is_requested_and_limited_alike_and_cores_are_not_limited() -> None:
    pod = of(manifests(request("--image x --cpu 3 --memory 5Gi")), "Deployment")["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {
        "requests": {"cpu": "3", "memory": "5Gi"},
        "limits": {"memory": "5Gi"},
    }


def test_pods_have_no_privileges_and_nodes_no_account() -> None:
    found = manifests(request())
    for kind in ("Deployment", "Job"):
        pod = of(found, kind)["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["containers"][0]["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
    assert of(found, "Deployment")["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_launcher_may_only_see_pods_and_scale_its_own_deployments() -> None:
    assert of(manifests(request()), "Role")["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": ["deployments/scale"],
            "resourceNames": ["fit", "fit-extra"],
            "verbs": ["get", "patch"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
    ]


def test_an_account_of_the_user_needs_no_rights_of_ours() -> None:
    found = manifests(request("--image x --service-account fitter"))
    assert {each["kind"] for each in found} == {"Deployment", "PodDisruptionBudget", "Job"}
    assert of(found, "Job")["spec"]["template"]["spec"]["serviceAccountName"] == "fitter"


def test_words_of_pods_are_commands() -> None:
    for kind, name in (("Deployment", "fit"), ("Deployment", "fit-extra"), ("Job", "fit-launcher")):
        container = of(manifests(full()), kind, name)["spec"]["template"]["spec"]["containers"][0]
        program, *words = [*container["command"], *container.get("args", [])]
        assert program == "taskgraph"
        parser(words).parse_args(words)


def test_extra_nodes_have_their_priority_and_their_own_selector() -> None:
    found = manifests(request("--image x --priority-class high", extra_nodes=6, extra_priority="low"))
    core, extra = of(found, "Deployment", "fit"), of(found, "Deployment", "fit-extra")
    assert [each["spec"]["replicas"] for each in (core, extra)] == [4, 6]
    assert [each["spec"]["template"]["spec"]["priorityClassName"] for each in (core, extra)] == ["high", "low"]
    assert core["spec"]["selector"] != extra["spec"]["selector"]


def test_without_tls_there_are_no_certificates() -> None:
    found = manifests(request(insecure=True))
    container = of(found, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert "--insecure-listen" in container["command"]
    assert not [each for each in container["env"] if "TLS" in each["name"]]


def test_words_of_the_user_reach_the_launcher_as_they_are() -> None:
    found = manifests(request(words=("-o", "text=$(HOME) $$5")))
    (launcher,) = of(found, "Job")["spec"]["template"]["spec"]["containers"]
    assert launcher["args"][:3] == ["fit.py", "-o", "text=$$(HOME) $$$$5"], "Kubernetes makes one of two"


def test_patch_file_changes_objects(tmp_path: Path) -> None:
    patch = tmp_path / "patch.yaml"
    patch.write_text(
        """
kind: Deployment
metadata: {name: fit}
spec:
  template:
    spec:
      priorityClassName: mine
      shareProcessNamespace: null
      containers:
        - name: node
          env: [{name: TASKGRAPH_ETCD, value: "other:1"}, {name: NEW, value: a}]
        - {name: sidecar, image: sidecar}
      volumes: [{name: runtime, $patch: delete}]
---
kind: PodDisruptionBudget
$patch: delete
"""
    )
    found = manifests(request(f"--image x --patch {patch}", extra_nodes=1, extra_priority="low"))
    assert not [each for each in found if each["kind"] == "PodDisruptionBudget"]
    pod = of(found, "Deployment", "fit")["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == "mine"
    assert "shareProcessNamespace" not in pod
    node, sidecar = pod["containers"]
    assert sidecar == {"name": "sidecar", "image": "sidecar"}
    env = {each["name"]: each.get("value") for each in node["env"]}
    assert (env["TASKGRAPH_ETCD"], env["NEW"], env["TASKGRAPH_RUNTIME_DIR"]) == ("other:1", "a", "/run/taskgraph")
    assert [each["name"] for each in pod["volumes"]] == ["secret"]
    assert of(found, "Deployment", "fit-extra")["spec"]["template"]["spec"]["priorityClassName"] == "low"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: Deployment\nmetadata: {name: fat}\n", "there is no Deployment fat; there are: .*Deployment fit"),
        ("spec: {}\n", "begins with the kind"),
        ("kind: [\n", "this is no YAML"),
        ("kind: Job\nmetadata: fit\n", "'fit' is no metadata"),
        ("kind: Job\nmetadata: {annotations: {since: 2026-01-01}}\n", "quote dates"),
        ("kind: Job\nspec: {template: {spec: {containers: [{image: x}]}}}\n", "has no 'name'"),
    ],
)
def test_bad_patches_are_refused(tmp_path: Path, text: str, message: str) -> None:
    patch = tmp_path / "patch.yaml"
    patch.write_text(text)
    with pytest.raises(JobError, match=message):
        manifests(request(f"--image x --patch {patch}"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--image: name the image"),
        ("--image x --cpu many", "--cpu many: write cores"),
        ("--image x --memory 4GB", "--memory 4GB: write bytes with a unit, such as 512Mi"),
        ("--image x --gpus all", "--gpus all: write a number"),
        ("--image x --volume data", "--volume data: write SOURCE:PATH"),
        ("--image x --volume data:relative", "write SOURCE:PATH"),
        ("--image x --volume Data:/data", "--volume Data: Kubernetes has no such names"),
        ("--image x --env 1A=2", "--env 1A=2: write NAME=VALUE"),
        ("--image x --toleration spot:Never", "effects are NoSchedule"),
        ("--image x --node-selector fast", "write KEY=VALUE"),
        ("--image x --user 0", "a number other than 0"),
        ("--image x --queue a/b", "--queue a/b"),
        ("--image x --patch /no/such/file", "--patch /no/such/file: No such file"),
    ],
)
def test_bad_options_are_refused(words: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        manifests(request(words))


def test_missing_etcd_and_priority_are_refused() -> None:
    with pytest.raises(JobError, match="--etcd: name your etcd as pods reach it"):
        manifests(request(etcd=""))
    with pytest.raises(JobError, match="--extra-priority"):
        manifests(request(extra_nodes=2))


def test_certificates_of_the_user_need_a_name() -> None:
    files = {"ca": "ca.pem", "cert": "cert.pem", "key": "key.pem"}
    with pytest.raises(JobError, match="--tls-name"):
        manifests(request(node_tls=files))
    container = of(manifests(request(node_tls={**files, "name": "nodes"})), "Job")["spec"]["template"]["spec"]
    assert {"name": "TASKGRAPH_TLS_NAME", "value": "nodes"} in container["containers"][0]["env"]


@pytest.mark.parametrize("job", ["9lives", "über", "a" * 41, "a-"])
def test_names_that_kubernetes_lacks_are_refused(job: str) -> None:
    with pytest.raises(JobError, match="choose another with --name"):
        object_name(job)


def test_names_of_python_become_names_of_kubernetes() -> None:
    assert object_name("Linear_regression.2") == "linear-regression-2"


def any_request(rng: random.Random) -> Any:
    """Returns a request with random options."""

    def some(*words: str) -> str:
        return rng.choice(["", *words])

    words = " ".join(
        [
            f"--image {rng.choice(['x', 'registry.example:5000/team/fit@sha256:0123', 'fit:1.2'])}",
            some("--workdir /srv/fit", "--workdir /"),
            some("--cpu 2", "--cpu 500m", "--cpu 0.5"),
            some("--memory 512Mi", "--memory 4Gi", "--memory 1.5G"),
            some("--gpus 2", "--gpus amd.com/gpu=1"),
            some("--priority-class high"),
            some("--queue team"),
            some("--node-selector pool=fast --node-selector kubernetes.io/arch=arm64", "--node-selector empty="),
            some("--toleration spot", "--toleration spot=yes:NoSchedule --toleration gpu:NoExecute"),
            some("--volume data:/data:ro", "--volume empty:/scratch --volume /mnt/fast:/fast"),
            some("--env A=1", "--env URL=http://x/?a=b,c: --env YES=yes"),
            some("--service-account fitter"),
            some("--user 1000", "--user cluster"),
            some("--result /data/result.json"),
        ]
    )
    extra = rng.choice([0, 0, 3])
    return request(
        words,
        job=rng.choice(["fit", "linear_regression", "A.b"]),
        driver=rng.choice(["fit.py", "package.module:job", "/srv/fit/fit.py"]),
        words=rng.choice([(), ("-o", "epochs=3"), ("-o", "text=a: {b} # c", "--set", "drain_s=5"), ("--resume",)]),
        nodes=rng.randrange(1, 300),
        extra_nodes=extra,
        extra_priority="low" if extra else "",
        drain_s=rng.choice([0.5, 60.0, 3600.0]),
        insecure=rng.random() < 0.2,
        etcd_access=rng.choice([{}, {"ca": "/a/ca.pem", "cert": "/a/c.pem", "key": "/a/k.pem"}]),
    )


def test_etcd_for_a_trial_fits_the_schemas() -> None:
    schemas = Schemas("1.37")
    for each in yaml.safe_load_all((ROOT / "examples" / "kubernetes" / "etcd.yaml").read_text()):
        schemas.check(each)


class Schemas:
    """The schemas of kubernetes-validate, strict ones; read once, as its own function reads them each time."""

    def __init__(self, version: str) -> None:
        validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate (108 MB) is not installed")
        (self._folder,) = (Path(validate.__file__).parent / "kubernetes-json-schema").glob(f"v{version}.*-local-strict")
        self._validators: dict[str, Any] = {}

    def check(self, made: dict[str, Any]) -> None:
        from jsonschema.validators import Draft202012Validator
        from referencing import Registry, Resource

        group, _, version = made["apiVersion"].rpartition("/")
        name = "-".join(filter(None, (made["kind"].lower(), group.partition(".")[0], version)))
        if name not in self._validators:
            schema, shared = (
                json.loads((self._folder / f"{each}.json").read_text()) for each in (name, "_definitions")
            )
            registry = Resource.from_contents(shared) @ (Resource.from_contents(schema) @ Registry())
            self._validators[name] = Draft202012Validator(schema, registry=registry)
        self._validators[name].validate(made)


@pytest.mark.slow
@pytest.mark.parametrize(("version", "count"), [("1.29", 30), ("1.37", 200)])
def test_random_manifests_fit_the_schemas_of_kubernetes(version: str, count: int) -> None:
    """`.ci/run` installs kubernetes-validate, which has the schemas."""
    schemas, rng = Schemas(version), random.Random(45)
    for _ in range(count):
        made, namespace = any_request(rng), rng.choice(["", "team"])
        found = manifests(made, namespace)
        assert list(yaml.load_all(manifest_text(made, namespace), LOADER)) == found
        for each in [*found, secret(made, "team", {"ca.pem": b"x"}) if not made.etcd_access else found[0]]:
            schemas.check(each)
