"""The Kubernetes manifests: valid by the API's own schemas, and in agreement with Seer's configuration.

No cluster is needed, nor was one tried. `kubectl` or `kustomize` renders the overlays where one is installed;
the files themselves are checked everywhere.
"""

import re
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from seer.cli.main import main
from seer.common.config import load
from seer.common.net.keys import read_secret

OPS = Path(__file__).resolve().parents[2] / "ops" / "kubernetes"
DOCKERFILE = OPS.parents[1] / "compose" / "Dockerfile"
FILES = sorted(path for path in OPS.rglob("*.yaml") if path.name != "kustomization.yaml")
VERSION = kubernetes_validate.latest_version()


def documents(text):
    return [document for document in yaml.safe_load_all(text) if document]


DOCUMENTS = {
    f"{path.stem}/{each['kind']}/{each['metadata']['name']}": each
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


def render(folder):
    for tool, *command in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(tool):
            return documents(
                subprocess.run(
                    [tool, *command, folder], capture_output=True, text=True, check=True, timeout=60
                ).stdout
            )
    pytest.skip("neither kubectl nor kustomize is installed")


def environ(container):
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def config(name):
    settings = {key: value for key, value in environ(CONTAINERS[name][1]).items() if key.startswith("SEER_")}
    settings = {key: value.replace("$(POD_IP)", "10.0.0.9") for key, value in settings.items()}
    return load(OPS / "base" / "seer.toml", settings)


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


@pytest.mark.parametrize(("overlay", "engines"), [("base", 2), ("pool", 2), ("example", 8)])
def test_overlays_render_to_what_the_api_takes(overlay, engines):
    found = render(OPS / overlay)
    for each in found:
        kubernetes_validate.validate(each, VERSION, strict=True)
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == "seer"
    sets = {each["metadata"]["name"]: each for each in found if each["kind"] in ("StatefulSet", "Deployment")}
    assert sets["seer-engine"]["spec"]["replicas"] == engines
    (engine,) = sets["seer-engine"]["spec"]["template"]["spec"]["containers"]
    assert (environ(engine).get("SEER_POOL__KIND") == "mooncake") == (overlay == "pool")
    assert ("seer-pool-owner" in sets) == (overlay == "pool")
    images = {
        each["image"] for one in sets.values() for each in one["spec"]["template"]["spec"]["containers"]
    }
    if overlay == "example":
        assert images == {"registry.example/seer:core", "registry.example/seer:cuda"}
    (rendered,) = [each for each in found if each["kind"] == "ConfigMap"]
    assert rendered["data"]["seer.toml"] == (OPS / "base" / "seer.toml").read_text()
    uses = [each["configMap"]["name"] for one in sets.values()
            for each in one["spec"]["template"]["spec"]["volumes"] if "configMap" in each]  # fmt: skip
    assert set(uses) == {rendered["metadata"]["name"], "seer-public"}


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
    settings = environ(container)
    assert settings["SEER_SECURITY__KEY"] == f"{mounts['key']}/key"
    for setting, file in (("SEER_SECURITY__SERVER", "server.pub"), ("SEER_SECURITY__PEERS", "peers")):
        assert settings.get(setting, f"{mounts['public']}/{file}") == f"{mounts['public']}/{file}"
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
    service = {each["port"] for each in DOCUMENTS["head/Service/seer-head"]["spec"]["ports"]}
    own = {
        "buffer": [endpoints.trainers, endpoints.engines, endpoints.events, endpoints.event_snapshots],
        "context": [endpoints.estimates, endpoints.estimate_snapshots],
        "dgds": [endpoints.dgds],
    }
    for name, listens in own.items():
        container = CONTAINERS[name][1]
        assert {each["containerPort"] for each in container["ports"]} == {port(each) for each in listens}
        for probe in ("readinessProbe", "livenessProbe"):
            assert port(container[probe]["exec"]["command"][-1]) in {port(each) for each in listens}
    listened = {port(each) for listens in own.values() for each in listens}
    assert service == listened
    default = load(None).endpoints
    assert listened == {
        port(getattr(default, name)) for name in default.__struct_fields__ if name != "bind_host"
    }
    for name in default.__struct_fields__:
        if name != "bind_host":
            assert getattr(endpoints, name).startswith("tcp://seer-head:")


def test_the_network_policy_lets_in_what_is_used_and_no_more():
    members = DOCUMENTS["network/NetworkPolicy/seer-members"]["spec"]["ingress"][0]["ports"]
    pool = config("pool-master").pool
    low, high = map(int, pool.ports.split("-"))
    heads = {each["port"] for each in DOCUMENTS["head/Service/seer-head"]["spec"]["ports"]}
    weights = port(config("engine").engine.weights_endpoint)
    wanted = heads | {port(pool.master), port(pool.metrics), weights} | set(range(low, high + 1))
    assert ports_of(members) == wanted
    trainers = DOCUMENTS["network/NetworkPolicy/seer-trainers"]["spec"]["ingress"][0]["ports"]
    assert ports_of(trainers) == {port(config("buffer").endpoints.trainers)}


def test_what_lasts_is_on_the_head_s_volume():
    buffer, dgds = config("buffer").buffer, config("dgds").dgds
    assert buffer.keep_chunks
    for path in (buffer.log, buffer.images, buffer.spool, dgds.remember_path):
        assert path.startswith("/var/lib/seer/")
    for name in ("buffer", "dgds"):
        mounts = {each["name"]: each["mountPath"] for each in CONTAINERS[name][1]["volumeMounts"]}
        assert mounts["state"] == "/var/lib/seer"


def test_an_engine_has_the_time_to_load():
    probe = CONTAINERS["engine"][1]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= config("engine").engine.load_seconds + 60
