"""The manifests of the cluster: what they name is there, nobody is root, and they are what the composed servers are."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import clients
from clinrl.config.params import load_params

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/kubernetes"
OVERLAYS = ("base", "gpu")
VALIDATOR = "kubernetes-validate==1.37.0"
VERSION = "1.34"
"""Of Kubernetes, whose schemas the manifests keep."""
VALIDATE = f"""
import json, sys, kubernetes_validate
for object in json.load(sys.stdin):
    kubernetes_validate.validate(object, {VERSION!r}, strict=True)
    print(object["kind"], object["metadata"]["name"])
"""
Object = dict[str, Any]


def read(overlay: str) -> list[Object]:
    """The objects of a kustomization and of those that it builds on, with the names of what is generated."""
    folder = FOLDER / overlay
    rules = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    known = {"apiVersion", "kind", "namespace", "resources", "secretGenerator", "configMapGenerator", "replicas"}
    assert rules.keys() <= known, "this reader knows no other rules"
    found: list[Object] = []
    for name in rules["resources"]:
        if (folder / name).is_dir():
            found += read(os.path.relpath((folder / name).resolve(), FOLDER))
        else:
            found += yaml.safe_load_all((folder / name).read_text(encoding="utf-8"))
    for rule in rules.get("replicas", ()):
        (scaled,) = (one for one in found if one["metadata"]["name"] == rule["name"] and one["kind"] == "StatefulSet")
        scaled["spec"]["replicas"] = rule["count"]
    for made in rules.get("configMapGenerator", ()):
        data = {name: (folder / name).read_text(encoding="utf-8") for name in made["files"]}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": made["name"]}, "data": data})
    for made in rules.get("secretGenerator", ()):
        assert made["envs"] == [".env"]
        data = dict.fromkeys(settings(), "secret")
        found.append({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": made["name"]}, "stringData": data})
    return found


def settings() -> list[str]:
    """The keys of .env.example."""
    lines = (FOLDER / "base/.env.example").read_text(encoding="utf-8").splitlines()
    return [line.partition("=")[0] for line in lines if line and not line.startswith("#")]


def of(objects: list[Object], *kinds: str) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] in kinds}


def pods(objects: list[Object]) -> dict[str, Object]:
    """The specification of each workload's pods."""
    return {name: one["spec"]["template"]["spec"] for name, one in of(objects, "Deployment", "StatefulSet").items()}


def containers(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    for name, pod in pods(objects).items():
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            yield f"{name}/{container['name']}", container


def variables(container: Object) -> dict[str, Any]:
    """What a container's environment says: text, or whence it comes."""
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container.get("env", ())}


def main(objects: list[Object], name: str) -> Object:
    """The container that a workload is named after."""
    return next(one for one in pods(objects)[name]["containers"] if one["name"] == name)


@pytest.fixture(params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return read(request.param)


def test_every_name_leads_to_something(objects: list[Object]) -> None:
    held = of(objects, "Secret")["secrets"]["stringData"].keys()
    made = {"secrets": of(objects, "Secret"), "configs": of(objects, "ConfigMap")}
    used = set()
    for where, container in containers(objects):
        said = variables(container)
        for name, value in said.items():
            if isinstance(value, dict) and "secretKeyRef" in value:
                assert value["secretKeyRef"]["name"] in made["secrets"], where
                assert value["secretKeyRef"]["key"] in held, where
                used.add(value["secretKeyRef"]["key"])
            before = [*said][: [*said].index(name)]
            for other in re.findall(r"\$\((\w+)\)", value) if isinstance(value, str) else ():
                assert other in before, f"{where}: {name} is expanded from {other}, which must stand before it"
        for other in re.findall(r"\$\((\w+)\)", " ".join(container["command"])) if "command" in container else ():
            assert other in said, where
    assert used == {*held}, "a key of .env.example that nothing reads"
    for name, pod in pods(objects).items():
        volumes = {one["name"]: one for one in pod.get("volumes", ())}
        claims = of(objects, "StatefulSet").get(name, {}).get("spec", {}).get("volumeClaimTemplates", ())
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            for mount in container.get("volumeMounts", ()):
                assert mount["name"] in volumes.keys() | {claim["metadata"]["name"] for claim in claims}, name
        for volume in volumes.values():
            config = volume.get("configMap", {"optional": True})
            assert config.get("optional") or config["name"] in made["configs"], name


def test_every_address_is_that_of_a_service_and_every_service_has_pods(objects: list[Object]) -> None:
    services, workloads = of(objects, "Service"), of(objects, "Deployment", "StatefulSet")
    labels = {name: one["spec"]["template"]["metadata"]["labels"] for name, one in workloads.items()}
    for name, workload in workloads.items():
        assert workload["spec"]["selector"]["matchLabels"] == labels[name] == {"app": name}
        assert workload["spec"].get("serviceName", name) in services
    ports = {}
    for name, service in services.items():
        assert service["spec"]["selector"] == labels[name]
        (port,) = service["spec"]["ports"]
        (listens,) = main(objects, name)["ports"]
        assert (port["targetPort"], port["port"]) == (listens["name"], listens["containerPort"])
        ports[name] = port["port"]
    asked = {
        address
        for _, container in containers(objects)
        for text in (*container.get("command", ()), *map(str, variables(container).values()))
        for address in re.findall(r"(?:@|http://)(\w+)(?::(\d+))?/?", text)
    }
    for name, number in asked - {("127", "")}:
        assert int(number or 5432) == ports[name], name
    assert {name for name, _ in asked} >= {"database", "prefect", "mlflow"}
    asks = {  # of each workload, the services that its containers ask
        name: set(re.findall(r"(?:@|http://)(\w+)", json.dumps(pod))) & ports.keys()
        for name, pod in pods(objects).items()
    }
    for name, policy in of(objects, "NetworkPolicy").items():
        spec = policy["spec"]
        if name == "nobody":
            assert spec == {"podSelector": {}, "policyTypes": ["Ingress"]}
            continue
        assert spec["podSelector"] == {"matchLabels": labels[name]}
        ((rule),) = spec["ingress"]
        assert rule["ports"] == [{"port": ports[name]}]
        named = {app for peer in rule["from"] for one in peer.get("podSelector", {}).get("matchExpressions", ())
                 for app in one["values"]}  # fmt: skip
        assert named <= {*workloads, "worker-gpu"}
        assert {workload for workload, asked in asks.items() if name in asked} - {name} <= named, name
    assert of(objects, "NetworkPolicy").keys() == {"nobody", *services} - {"worker", "worker-gpu"}


def pools(text: str) -> set[str]:
    """The work pools whose worker a text starts."""
    return set(re.findall(r"prefect worker start (?:--\S+ )*--pool (\S+)", text))


def test_each_pool_has_a_worker_in_the_cluster_or_by_the_page_elsewhere() -> None:
    written = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    there = {
        pool for _, container in containers(read("base")) for pool in pools(" ".join(container.get("command", ())))
    }
    assert there == {"clinrl", "clinrl-serving"}
    page = (ROOT / "docs/many-machines.md").read_text(encoding="utf-8")
    named = {entry["work_pool"]["name"] for entry in written}
    assert named == pools(page)
    for pool in named - there:
        assert f"`{pool}` run outside of the cluster" in page
    assert {entry["name"] for entry in written if entry["work_pool"]["name"] == "clinrl"} == {"elsewhere"}


def test_who_looks_at_the_counts_is_beside_what_serves_and_its_end_is_not_that_of_the_pod() -> None:
    pod = pods(read("base"))["serve"]
    serves, watches = pod["containers"]
    assert pools(watches["command"][2]) == {"clinrl-serving"}
    assert "--limit 1 " in watches["command"][2]
    assert (watches["workingDir"], watches["volumeMounts"]) == (serves["workingDir"], serves["volumeMounts"])
    assert "readinessProbe" not in watches
    assert pod["hostname"] == "serve", "a run of a pod that was replaced is known as dead by its host's name"
    assert {"PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_URI"} <= variables(watches).keys()


@pytest.mark.long
def test_the_exams_against_which_drift_is_seen_are_fetched() -> None:
    follows = next(one for one in pods(read("base"))["serve"]["initContainers"] if one["name"] == "follow")
    assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"} <= variables(follows).keys()
    (program,) = re.findall(r"python -c '(.+?)'", follows["command"][2], re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    params = load_params(ROOT / "params.yaml")
    exams = {params.model(name).exam for name, version in params.versions.items() if version.task == "esi"}
    exams &= {*params.datasets}  # what is imported has no remote
    assert {*done.stdout.split()} == {f"dataset@{exam}" for exam in exams}


@pytest.mark.long
def test_a_history_without_what_was_served_is_not_followed_and_that_is_said(tmp_path: Path) -> None:
    follows = next(one for one in pods(read("base"))["serve"]["initContainers"] if one["name"] == "follow")
    once = "for _ in 1; do" + follows["command"][2].rpartition("-delete\n")[2]

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.check_output(["git", *who, *words], cwd=tmp_path / "origin", text=True)

    (tmp_path / "origin").mkdir()
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "begun")
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{tmp_path}/origin", tmp_path / "served"], check=True)
    for change, is_followed in (([], True), (["--amend"], False)):
        git("commit", "-q", "--allow-empty", "-m", f"promoted {change}", *change)
        served: dict[str, Any] = {"cwd": tmp_path / "served", "capture_output": True, "text": True, "check": False}
        done = subprocess.run(["bash", "-c", once], **served)
        head = subprocess.run(["git", "rev-parse", "HEAD"], **served).stdout
        assert (head == git("rev-parse", "HEAD")) == is_followed
        assert ("no rollback is followed" in done.stderr) != is_followed, done.stderr


@pytest.mark.parametrize("page", ["docs/many-machines.md", "docs/operations.md"])
def test_what_a_page_deploys_is_in_prefect_yaml(page: str) -> None:
    from prefect.cli.deploy._config import _filter_matching_deploy_config

    written = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    text = (ROOT / page).read_text(encoding="utf-8")
    for command in re.findall(r"prefect .*\bdeploy (.+)", text):
        for name in re.findall(r"--name (\S+)", command):
            assert len(_filter_matching_deploy_config(name, written)) == 1, name
    for name in re.findall(r"exec deployment/(\S+)|exec (?:-i )?(\w+)-0 ", text):
        assert "".join(name) in pods(read("base"))


def test_nobody_is_root_and_what_listens_is_looked_after(objects: list[Object]) -> None:
    for name, pod in pods(objects).items():
        may = pod["securityContext"]
        assert (may["runAsNonRoot"], may["seccompProfile"]) == (True, {"type": "RuntimeDefault"}), name
        assert may["runAsUser"] == (999 if name == "database" else 1000), name
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False), name
    image = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    assert "useradd --create-home --uid 1000 clinrl" in image
    assert "    DO_NOT_TRACK=true\n" in image, "servers of MLflow report their use"
    for where, container in containers(objects):
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys(), where
        assert "memory" in resources["limits"], where
        if "ports" in container:
            assert {"readinessProbe", "livenessProbe"} <= container.keys(), where
    (namespace,) = of(objects, "Namespace").values()
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}


def test_a_database_without_a_network_is_not_ready_and_nothing_ends_while_it_is_busy_or_writes() -> None:
    """The image of PostgreSQL makes its databases in a server that listens on a socket alone."""
    composed = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text(encoding="utf-8"))["services"]
    database = main(read("base"), "database")
    probes = [database[probe]["exec"]["command"] for probe in ("readinessProbe", "livenessProbe")]
    for words in (composed["database"]["healthcheck"]["test"][1:], *probes):
        assert words == ["pg_isready", "-h", "127.0.0.1", "-U", "postgres"]
    for name in ("database", "prefect", "mlflow"):
        probes = [main(read("base"), name)[probe] for probe in ("readinessProbe", "livenessProbe")]
        assert min(probe.get("timeoutSeconds", 1) for probe in probes) >= 5, name
    grace = f"{pods(read('base'))['worker']['terminationGracePeriodSeconds'] // 60}m"
    assert [composed[name].get("stop_grace_period") for name in ("database", "worker")] == [grace, grace]


def test_the_logs_of_composed_services_do_not_grow_for_ever() -> None:
    composed = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text(encoding="utf-8"))["services"]
    assert [name for name, one in composed.items() if one.get("logging") != {"driver": "local"}] == []


def test_pages_of_prefect_ask_an_address_that_a_browser_reaches() -> None:
    composed = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text(encoding="utf-8"))["services"]["prefect"]
    for said in (composed["environment"], variables(main(read("base"), "prefect"))):
        assert said.get("PREFECT_UI_API_URL") == "http://127.0.0.1:4200/api", "else they ask http://0.0.0.0:4200/api"
    assert "/api/ready" in composed["healthcheck"]["test"][-1], "/api/health says nothing of the database"


def test_no_secret_is_in_git() -> None:
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "/deploy/kubernetes/base/.env" in ignored
    secret = {
        "POSTGRES_PASSWORD",
        "S3_USER",
        "S3_PASSWORD",
        "GIT_TOKEN",
        "CLINRL_SERVE_TOKEN",
        "PREFECT_API_AUTH_STRING",
    }
    example = (FOLDER / "base/.env.example").read_text(encoding="utf-8").splitlines()
    assert secret <= {line.removesuffix("=") for line in example}
    for where, container in containers(read("gpu")):
        for name, value in variables(container).items():
            if re.search("PASSWORD|SECRET|TOKEN|AUTH_STRING|KEY_ID", name):
                assert "secretKeyRef" in value, f"{where}: {name}"


def test_the_cluster_has_the_composed_servers_by_the_same_names() -> None:
    composed = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text(encoding="utf-8"))["services"]
    objects = read("base")
    shared = composed.keys() & pods(objects).keys()
    assert shared == {"database", "prefect", "mlflow", "worker"}
    assert composed.keys() - shared == {"s3", "bucket"}  # outside of the cluster
    for name in shared:
        container, service = main(objects, name), composed[name]
        assert container["image"] == service["image"], name
        said = {word.replace("$(S3_BUCKET)", "clinrl") for word in container.get("command", ())}
        assert said - {"--with-healthcheck"} == {*service.get("command", ())}, name
        asked = (
            {*service["environment"]}
            - {"POSTGRES_PASSWORD"}
            - ({"MLFLOW_S3_ENDPOINT_URL"} if name == "worker" else set())
        )
        assert asked <= variables(container).keys(), name
        for key, value in service["environment"].items():
            if key in ("CLINRL_SLOT", "AWS_DEFAULT_REGION") or "S3" in key or "AWS" in key:
                continue
            plain = re.sub(r"\$\{(\w+):\?\}", r"$(\1)", value).replace("$$", "$")
            there = variables(container)[key]
            assert there == plain or f"$({there['secretKeyRef']['key']})" == plain, f"{name}: {key}"
        for port in service.get("ports", ()):
            assert int(port.rpartition(":")[2]) == container["ports"][0]["containerPort"], name
    sql = (FOLDER / "base/databases.sql").read_text(encoding="utf-8")
    for name in ("prefect", "mlflow"):
        assert f"create database {name};" in sql
        assert any(str(value).endswith(f"@database/{name}") for value in variables(main(objects, name)).values())


def test_a_worker_with_a_gpu_is_a_worker_with_a_gpu() -> None:
    plain, other = (main(read("gpu"), name) for name in ("worker", "worker-gpu"))
    assert other["resources"]["limits"]["nvidia.com/gpu"] == "1"
    slots = [variables(one)["CLINRL_SLOT"] for one in (plain, other)]
    assert slots == ["cpu-of-$(POD)", "gpu-0-of-$(POD)"]
    text = json.dumps(other).replace("worker-gpu", "worker").replace("clinrl-gpu", "clinrl").replace(*reversed(slots))
    assert {**json.loads(text), "resources": None} == {**plain, "resources": None}


@pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl, whose kustomize reads them")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_reads_what_these_tests_read(overlay: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    shutil.copy(tmp_path / "base/.env.example", tmp_path / "base/.env")
    command = ["kubectl", "kustomize", str(tmp_path / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rendered = [*yaml.safe_load_all(done.stdout)]

    def names(objects: list[Object]) -> list[tuple[str, str]]:  # what is generated has a digest behind its name
        return sorted((one["kind"], re.sub(r"-\w{10}$", "", one["metadata"]["name"])) for one in objects)

    assert names(rendered) == names(read(overlay))
    assert {one["metadata"].get("namespace", "clinrl") for one in rendered} == {"clinrl"}
    (secret,) = of(rendered, "Secret")
    references = {
        value["secretKeyRef"]["name"]
        for _, container in containers(rendered)
        for value in variables(container).values()
        if isinstance(value, dict) and "secretKeyRef" in value
    }
    assert references == {secret}


@pytest.mark.slow
def test_the_manifests_keep_the_schemas_of_kubernetes() -> None:
    place = clients.client(VALIDATOR)
    objects = read("gpu")
    command = [str(place / "bin/python"), "-c", VALIDATE]
    done = subprocess.run(command, input=json.dumps(objects), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(objects)
    broken = json.loads(json.dumps(objects).replace("periodSeconds", "periodSecond"))
    done = subprocess.run(command, input=json.dumps(broken), capture_output=True, text=True, check=False)
    assert "periodSecond" in done.stderr, "a key that is none is not seen"
