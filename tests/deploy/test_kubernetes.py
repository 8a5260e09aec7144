"""The Kubernetes manifests: valid by the API's own schemas, and in agreement with Seer's configuration.

No cluster is needed. `kubectl` or `kustomize` renders the overlays where one is installed; the files themselves
are checked everywhere. `make kubernetes-test` runs them.
"""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from seer.cli.main import main
from seer.common.config import load
from seer.common.net.keys import read_secret
from seer.common.process.notify import BEAT_SECONDS, Notifier

OPS = Path(__file__).resolve().parents[2] / "ops" / "kubernetes"
DOCKERFILE = OPS.parents[1] / "compose" / "Dockerfile"
FILES = sorted(path for path in OPS.rglob("*.yaml") if path.name != "kustomization.yaml")
VERSION = kubernetes_validate.latest_version()
BESIDE = ("pool", "gateway", "trainer-memory")


def documents(text):
    return [document for document in yaml.safe_load_all(text) if document]


def kustomization(folder):
    return yaml.safe_load((OPS / folder / "kustomization.yaml").read_text())


DOCUMENTS = {
    f"{path.parent.name}/{path.stem}/{each['kind']}/{each['metadata']['name']}": each
    for path in FILES
    for each in documents(path.read_text())
}
PODS = {
    each["metadata"]["name"]: each["spec"]["template"]
    for each in DOCUMENTS.values()
    if each["kind"] in ("StatefulSet", "Deployment")
}
CONTAINERS = {
    container["name"]: (pod, container) for pod in PODS.values() for container in pod["spec"]["containers"]
}
SETTINGS = {
    each["name"]: OPS / folder / each["envs"][0]
    for folder in ("base", *BESIDE)
    for each in kustomization(folder).get("configMapGenerator", [])
}
"""The file of each ConfigMap that is generated."""

READERS = {
    "seer-all": {"seer-head", "seer-engine", "seer-gateway"},
    "seer-head": {"seer-head"},
    "seer-engine": {"seer-engine"},
    "seer-gateway": {"seer-gateway"},
    "seer-pool": {"seer-pool-master", "seer-pool-owner", "seer-engine"},
    "seer-pool-owner": {"seer-pool-owner"},
}
"""What an edit of its file starts again."""

POLICIES = {
    each["metadata"]["name"]: each["spec"] for each in DOCUMENTS.values() if each["kind"] == "NetworkPolicy"
}


@pytest.fixture
def everything(tmp_path):
    """A copy of the manifests, with a folder `all` that has all of them."""
    copy = tmp_path / "kubernetes"
    shutil.copytree(OPS, copy)
    (copy / "all").mkdir()
    resources = [f"../{each}" for each in ("base", *BESIDE)]
    made = kustomization("example") | {"resources": resources, "components": ["../ranks"]}
    made["configMapGenerator"] = [
        {"name": name, "behavior": "merge", "envs": [f"{name}.env"]} for name in SETTINGS
    ]
    for name in SETTINGS:
        (copy / "all" / f"{name}.env").write_text("")
    (copy / "all" / "kustomization.yaml").write_text(yaml.safe_dump(made))
    return copy


def render(folder):
    for tool, *command in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(tool):
            return documents(
                subprocess.run(
                    [tool, *command, folder], capture_output=True, text=True, check=True, timeout=60
                ).stdout
            )
    pytest.skip("neither kubectl nor kustomize is installed")


def workloads(rendered):
    return {
        each["metadata"]["name"]: each for each in rendered if each["kind"] in ("StatefulSet", "Deployment")
    }


def environ(container):
    return {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}


def sources(container):
    """Return the ConfigMaps whose settings a container has, if they are there."""
    return [each["configMapRef"]["name"] for each in container.get("envFrom", [])]


def read_env(file):
    return dict(line.split("=", 1) for line in file.read_text().splitlines() if line and line[0] != "#")


def config(name):
    settings = {}
    for source in sources(CONTAINERS[name][1]):
        settings |= read_env(SETTINGS[source])
    settings |= {key: value for key, value in environ(CONTAINERS[name][1]).items() if key.startswith("SEER_")}
    return load(None, {key: value.replace("$(POD_IP)", "10.0.0.9") for key, value in settings.items()})


def port(endpoint):
    return int(endpoint.rpartition(":")[2])


def ports_of(rules):
    found = set()
    for each in rules:
        found |= set(range(each["port"], each.get("endPort", each["port"]) + 1))
    return found


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_api_takes_it(name):
    kubernetes_validate.validate(DOCUMENTS[name], VERSION, strict=True)


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if "StatefulSet" in name])
def test_a_misspelt_field_is_noticed(name):
    text = yaml.safe_dump(DOCUMENTS[name])
    assert "volumeMounts" in text
    wrong = yaml.safe_load(text.replace("volumeMounts", "volumeMount"))
    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


@pytest.mark.parametrize(("overlay", "engines"), [("base", 2), ("example", 8), ("all", 8)])
def test_overlays_render_to_what_the_api_takes(everything, overlay, engines):
    found = render(everything / overlay)
    for each in found:
        kubernetes_validate.validate(each, VERSION, strict=True)
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == "seer"
    sets = workloads(found)
    assert sets.keys() == (PODS.keys() if overlay == "all" else {"seer-head", "seer-engine", "seer-exporter"})
    assert sets["seer-engine"]["spec"]["replicas"] == engines
    maps = {each["metadata"]["name"]: each["data"] for each in found if each["kind"] == "ConfigMap"}
    used = {
        source for one in sets.values() for each in one["spec"]["template"]["spec"]["containers"]
        for source in sources(each)
    }  # fmt: skip
    assert used - {"seer-pool"} == maps.keys()  # which is optional
    for name, file in SETTINGS.items():
        written = [data for each, data in maps.items() if re.fullmatch(f"{name}-[0-9a-z]{{10}}", each)]
        own = overlay == "all" or file.parent.name == "base"
        assert written == [read_env(file)] * own
    images = {
        each["image"] for one in sets.values() for each in one["spec"]["template"]["spec"]["containers"]
    }
    if overlay != "base":
        assert images == {
            f"registry.example/seer:{each}"
            for each in ("core", "cpu", "cuda")[:: 1 if overlay == "all" else 2]
        }


@pytest.mark.parametrize("source", SETTINGS)
def test_a_changed_setting_starts_again_what_reads_it_and_nothing_else(everything, source):
    """An edit gives its ConfigMap another name, and the pods that name it another template."""
    named = {
        name: [source in sources(each) for each in pod["spec"]["containers"]] for name, pod in PODS.items()
    }
    assert {name for name, uses in named.items() if any(uses)} == READERS[source]
    assert all(all(named[name]) for name in READERS[source])
    before = workloads(render(everything / "all"))
    for file in (everything / SETTINGS[source].relative_to(OPS), everything / "all" / f"{source}.env"):
        text = file.read_text()
        file.write_text(f"{text}SEER_LOG__LEVEL=debug\n")
        found = render(everything / "all")
        file.write_text(text)
        data = [each["data"] for each in found if each["kind"] == "ConfigMap"]
        assert read_env(SETTINGS[source]) | {"SEER_LOG__LEVEL": "debug"} in data
        after = workloads(found)
        changed = {
            name for name in after if after[name]["spec"]["template"] != before[name]["spec"]["template"]
        }
        assert changed == READERS[source]


def test_the_example_adds_to_every_file_of_the_base():
    generated = kustomization("example")["configMapGenerator"]
    own = [
        {"name": name, "behavior": "merge", "envs": [file.name]}
        for name, file in SETTINGS.items()
        if file.parent.name == "base"
    ]
    assert generated == own


@pytest.mark.parametrize("name", SETTINGS)
def test_a_file_has_only_what_its_readers_read(name):
    sections = {key.removeprefix("SEER_").partition("__")[0].lower() for key in read_env(SETTINGS[name])}
    wanted = {
        "seer-all": {"shared", "endpoints", "security", "log"},
        "seer-head": {"buffer", "dgds"},
        "seer-engine": {"engine"},
        "seer-gateway": {"gateway"},
    }
    assert sections == wanted.get(name, {"pool"})


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_command_line_takes_the_arguments(name):
    command, *arguments = CONTAINERS[name][1]["args"]
    main.commands[command].make_context(command, arguments)


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_is_confined(name):
    pod, container = CONTAINERS[name]
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    owner = spec["securityContext"]
    assert (owner["runAsNonRoot"], owner["runAsUser"], owner["fsGroup"]) == (True, 10001, 10001)
    assert owner["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert "memory" in container["resources"]["limits"]
    mounted = {each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"] for each in spec["volumes"]} | {"state"}
    assert mounted <= volumes
    assert pod["metadata"]["labels"]["seer/member"] == "true"


def test_the_user_is_the_images():
    assert re.search(r"\b10001\b", DOCKERFILE.read_text())


@pytest.mark.parametrize(
    "name", [name for name, (_, each) in CONTAINERS.items() if "SEER_SECURITY__KEY" in environ(each)]
)
def test_keys_are_where_the_process_looks_and_as_it_wants_them(name):
    pod, container = CONTAINERS[name]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    found = config(name).security
    assert found.key == f"{mounts['key']}/key"
    assert found.server == f"{mounts['public']}/server.pub"
    assert found.peers == ("" if name == "exporter" else f"{mounts['public']}/peers")
    secrets = [each["secret"] for each in pod["spec"]["volumes"] if "secret" in each]
    assert {each["defaultMode"] for each in secrets} == {0o440}


def test_a_secret_of_that_mode_is_read(tmp_path):
    """Root's file, that the pod's group may read."""
    from seer.cli.keys import init

    (secret, _) = init(tmp_path / "keys")
    secret.chmod(0o440)
    assert read_secret(secret)[0].role == "server"


def test_ports_agree_everywhere():
    endpoints = config("buffer").endpoints
    service = {each["port"] for each in DOCUMENTS["base/head/Service/seer-head"]["spec"]["ports"]}
    own = {
        "buffer": [endpoints.trainers, endpoints.engines, endpoints.events, endpoints.event_snapshots],
        "context": [endpoints.estimates, endpoints.estimate_snapshots],
        "dgds": [endpoints.dgds],
    }
    for name, listens in own.items():
        container = CONTAINERS[name][1]
        assert {each["containerPort"] for each in container["ports"]} == {port(each) for each in listens}
    listened = {port(each) for listens in own.values() for each in listens}
    assert service == listened
    default = load(None).endpoints
    assert listened == {
        port(getattr(default, name)) for name in default.__struct_fields__ if name != "bind_host"
    }
    for name in default.__struct_fields__:
        if name != "bind_host":
            assert getattr(endpoints, name).startswith("tcp://seer-head:")


def test_the_network_policies_let_in_what_is_used_and_no_more():
    heads = {each["port"] for each in DOCUMENTS["base/head/Service/seer-head"]["spec"]["ports"]}
    members = POLICIES["seer-members"]["ingress"][0]["ports"]
    assert ports_of(members) == heads | {port(config("engine").engine.weights_endpoint)}
    pool = config("pool-master").pool
    low, high = map(int, pool.ports.split("-"))
    wanted = {port(pool.master), port(pool.metrics)} | set(range(low, high + 1))
    assert ports_of(POLICIES["seer-pool"]["ingress"][0]["ports"]) == wanted
    assert ports_of(POLICIES["seer-trainers"]["ingress"][0]["ports"]) == {
        port(config("buffer").endpoints.trainers)
    }
    gateway = config("gateway").gateway
    agents, trainers = (ports_of(each["ports"]) for each in POLICIES["seer-gateway"]["ingress"])
    assert (agents, trainers) == ({port(gateway.data)}, {port(gateway.data), port(gateway.control)})


def test_members_reach_each_other_and_both_kinds_of_name_servers():
    members, servers = POLICIES["seer-members"]["egress"]
    assert members == {"to": [{"podSelector": {"matchLabels": {"seer/member": "true"}}}]}
    assert sorted((each["port"], each["protocol"]) for each in servers["ports"]) == [(53, "TCP"), (53, "UDP")]
    assert servers["to"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}},
        {"ipBlock": {"cidr": "169.254.20.10/32"}},
    ]


def test_ports_without_keys_are_open_to_those_alone_who_need_them():
    """Ranks and broadcasts listen at free ports, so no port is named."""
    engines = {"podSelector": {"matchLabels": {"app": "seer-engine"}}}
    trainers = {"podSelector": {"matchLabels": {"seer/trainer": "true"}}, "namespaceSelector": {}}
    assert POLICIES["seer-ranks"] == engines | {"policyTypes": ["Ingress"], "ingress": [{"from": [engines]}]}
    assert POLICIES["seer-trainer-memory"] == engines | {
        "policyTypes": ["Ingress", "Egress"], "ingress": [{"from": [trainers]}], "egress": [{"to": [trainers]}],
    }  # fmt: skip


def test_ranks_find_their_leader(everything):
    engine = workloads(render(everything / "all"))["seer-engine"]
    (container,) = engine["spec"]["template"]["spec"]["containers"]
    (rank,) = [each for each in container["env"] if each["name"] == "SEER_ENGINE__NODE_RANK"]
    assert rank["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"
    settings = {
        key: value for key, value in environ(container).items() if key.startswith("SEER_ENGINE__LEADER")
    }
    pod = f"{engine['metadata']['name']}-0.{engine['spec']['serviceName']}"
    assert load(None, settings).engine.leader == f"tcp://{pod}:7114"
    service = DOCUMENTS["base/engine/Service/seer-engine"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)


def test_what_lasts_is_on_the_head_s_volume():
    buffer, dgds = config("buffer").buffer, config("dgds").dgds
    assert buffer.keep_chunks
    for path in (buffer.log, buffer.images, buffer.spool, dgds.remember_path):
        assert path.startswith("/var/lib/seer/")
    for name in ("buffer", "dgds"):
        mounts = {each["name"]: each["mountPath"] for each in CONTAINERS[name][1]["volumeMounts"]}
        assert mounts["state"] == "/var/lib/seer"


# --- probes ------------------------------------------------------------------------------


def probe(name, kind, file):
    """Run a container's probe on a file in place of its own; return whether it succeeds."""
    command = CONTAINERS[name][1][f"{kind}Probe"]["exec"]["command"]
    own = environ(CONTAINERS[name][1])["SEER_ALIVE_FILE"]
    assert own in command[-1]
    command = [each.replace(own, str(file)) for each in command]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("name", CONTAINERS)
def test_probes_ask_the_service_alone_and_loading_trips_none(name, tmp_path):
    """A service that starts lives, however long; one that hangs does not; only one that has started is ready."""
    file = tmp_path / "alive"
    found = {kind: probe(name, kind, file) for kind in ("startup", "liveness", "readiness")}
    assert found == {"startup": False, "liveness": False, "readiness": False}
    notifier = Notifier({"SEER_ALIVE_FILE": str(file)})
    found = {kind: probe(name, kind, file) for kind in ("startup", "liveness", "readiness")}
    assert found == {"startup": True, "liveness": True, "readiness": False}
    notifier.ready()
    assert all(probe(name, kind, file) for kind in ("startup", "liveness", "readiness"))
    for age, lives in ((8 * BEAT_SECONDS, True), (70, False)):
        os.utime(file, (time.time() - age,) * 2)
        assert [probe(name, kind, file) for kind in ("startup", "liveness")] == [lives, lives]


def test_every_container_of_a_pod_has_a_file_of_its_own():
    for pod in PODS.values():
        files = [environ(each)["SEER_ALIVE_FILE"] for each in pod["spec"]["containers"]]
        assert len(set(files)) == len(files)
        assert all(re.fullmatch(r"/tmp/[a-z-]+\.alive", file) for file in files)


def test_engines_start_again_as_many_at_a_time_as_may_be_evicted():
    engine = DOCUMENTS["base/engine/StatefulSet/seer-engine"]["spec"]
    budget = DOCUMENTS["base/engine/PodDisruptionBudget/seer-engine"]["spec"]
    assert engine["updateStrategy"] == {
        "type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": budget["maxUnavailable"]},
    }  # fmt: skip
    assert engine["podManagementPolicy"] == "Parallel"  # in order, it is left aside


def test_a_pause_over_http_is_of_the_one_gateway():
    gateway = DOCUMENTS["gateway/gateway/Deployment/seer-gateway"]["spec"]
    assert (gateway["replicas"], gateway["strategy"]) == (1, {"type": "Recreate"})
