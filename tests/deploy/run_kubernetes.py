"""`make kubernetes-test`: applies `ops/kubernetes` to a cluster, and deletes its pods in the middle of a rollout.

What must hold: all pods become ready under the namespace's own restrictions; the exporter answers over TLS to
who has the password; with the head's pod and an engine's deleted at once, without a second to drain, a trainer
gets every response exactly once, and the same tokens as undisturbed, computed with a pool or without; a key that
is revoked is refused.

The cluster is the one that `kubectl` means: nodes without GPUs have the images, by names that IMAGES gives
(default: `seer:core seer:cpu`), and volumes are made for claims, or lie ready. Whether policies of the network are
enforced is the cluster's matter: what they permit must be enough. It makes, and deletes, the namespaces `seer` and
`seer-trainers`, and refuses to begin where there are such.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import support
from support import MODEL, PROMPTS, REPO, CannotRun, run, say, until

NAMESPACES = ("seer", "seer-trainers")
HEAD = "tcp://seer-head.seer:7101"
READY_SECONDS = 900
ROLLOUT_SECONDS = 600
REVOKED_SECONDS = 180
"""The kubelet brings a changed ConfigMap to its pods within a minute or two."""

USER = "prometheus:no-secret-of-yours"

SMALL = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "4Gi"}}
CONTAINERS = {"seer-head": 3, "seer-engine": 1, "seer-pool-master": 1, "seer-pool-owner": 1}
SETTINGS = {
    "seer-head": ["SEER_BUFFER__CHUNK_SIZE=32"],
    "seer-engine": [
        "SEER_ENGINE__KV_BLOCKS=512", "SEER_ENGINE__MAX_NUM_SEQS=32", "SEER_ENGINE__MAX_MODEL_LEN=512",
    ],
    "seer-pool": ["SEER_POOL__PULL_TOKENS=16"],
}  # fmt: skip

SCRAPE = """
import base64, ssl, urllib.request
asked = urllib.request.Request("https://seer-exporter.seer:7112/metrics")
asked.add_header("Authorization", "Basic " + base64.b64encode(open("/web/password", "rb").read().strip()).decode())
trusted = ssl.create_default_context(cafile="/web/tls.crt")
print(urllib.request.urlopen(asked, timeout=30, context=trusted).read().decode())
"""


def kubectl(*command, **options):
    return run("kubectl", *command, **options).stdout.strip()


def check_cluster():
    support.need("kubectl", "kubernetes-client")
    try:
        told = json.loads(kubectl("version", "-o", "json", seconds=30))
    except subprocess.CalledProcessError as error:
        raise CannotRun("no cluster answers: set KUBECONFIG") from error
    for name in NAMESPACES:
        if kubectl("get", "namespace", name, "--ignore-not-found"):
            raise CannotRun(f"the cluster has a namespace {name}: this test would delete it")
    say(f"cluster: Kubernetes {told['serverVersion']['gitVersion']}")


def overlay(kind, core, cpu):
    """Return the kustomization of small pods on CPUs; `kind`: `base`, or `pool` for a pool beside it."""
    with_pool = kind == "pool"
    patches = []
    for name, count in CONTAINERS.items():
        path = "/spec/template/spec/containers/{}/resources"
        steps = [{"op": "replace", "path": path.format(at), "value": SMALL} for at in range(count)]
        if with_pool or "pool" not in name:
            patches.append({"target": {"kind": "StatefulSet", "name": name}, "patch": json.dumps(steps)})
    claim = "/spec/volumeClaimTemplates/0/spec/resources/requests/storage"
    steps = [{"op": "replace", "path": claim, "value": "1Gi"}]
    patches.append({"target": {"kind": "StatefulSet", "name": "seer-head"}, "patch": json.dumps(steps)})
    images = []
    for name, image in (("core", core), ("cpu", cpu), ("cuda", cpu)):
        new, _, tag = image.rpartition(":")
        images.append({"name": f"seer-{name}", "newName": new, "newTag": tag})
    settings = [
        {"name": name, "behavior": "merge", "literals": literals}
        for name, literals in SETTINGS.items()
        if with_pool or "pool" not in name
    ]
    return {
        "resources": ["../base", *["../pool"] * with_pool], "namespace": "seer",
        "images": images, "patches": patches, "configMapGenerator": settings,
    }  # fmt: skip


class Cluster:
    """What docs/deployment.md says to make; everything is deleted at the end."""

    def __init__(self, folder):
        self.folder = folder
        self.keys = support.keys(folder / "keys", os.getuid())
        self.core, self.cpu = os.environ.get("IMAGES", "seer:core seer:cpu").split()
        (folder / "password").write_text(USER + "\n")
        run(
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", folder / "tls.key",
            "-out", folder / "tls.crt", "-subj", "/CN=seer", "-addext", "subjectAltName=DNS:seer-exporter.seer",
        )  # fmt: skip
        self.manifests = folder / "kubernetes"
        shutil.copytree(REPO / "ops" / "kubernetes", self.manifests)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None:
            for what in (("get", "pods", "-o", "wide"), ("get", "events", "--sort-by=.lastTimestamp")):
                print(kubectl("-n", "seer", *what))
        for name in NAMESPACES:
            kubectl("delete", "namespace", name, "--ignore-not-found")

    def apply(self, text):
        kubectl("apply", "-f", "-", input=text if isinstance(text, str) else json.dumps(text))

    def hold(self, kind, namespace, name, *files):
        """Make a Secret or ConfigMap of these files, or change it."""
        kinds = ["generic"] if kind == "secret" else []
        given = [f"--from-file={file}" for file in files]
        self.apply(
            kubectl("-n", namespace, "create", kind, *kinds, name, *given, "--dry-run=client", "-o", "yaml")
        )

    def prepare(self):
        kubectl("apply", "-f", self.manifests / "base" / "namespace.yaml")
        kubectl("create", "namespace", "seer-trainers")
        web = [self.folder / name for name in ("tls.crt", "tls.key", "password")]
        for name, role in (("head", "server"), ("engine", "engine"), ("observer", "observer")):
            self.hold("secret", "seer", f"seer-{name}-key", f"key={self.keys / role}.key")
        self.hold("secret", "seer", "seer-exporter-web", *web)
        self.publish()
        public = self.keys / "public" / "server.pub"
        self.hold("secret", "seer-trainers", "trainer", f"key={self.keys}/trainer-run.key", public)
        self.hold("secret", "seer-trainers", "web", web[0], web[2])
        self.hold("configmap", "seer-trainers", "given", PROMPTS, *MODEL.glob("*.json"))
        claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
        self.apply(
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": claim,
             "metadata": {"name": "models", "namespace": "seer"}}
        )  # fmt: skip
        mounts = [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}]
        self.pod("seer", "loader", mounts, {"models": "/models"}, {})
        kubectl("-n", "seer", "cp", MODEL, "loader:/models/model")
        kubectl("-n", "seer", "delete", "pod", "loader", "--grace-period=1")

    def publish(self):
        self.hold("configmap", "seer", "seer-public", self.keys / "public")

    def pod(self, namespace, name, volumes, mounts, environ):
        """Start a pod that does nothing, within what the namespace permits; wait for it."""
        locked = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        container = {
            "name": name, "image": self.core, "command": ["sleep", "100000"], "securityContext": locked,
            "env": [{"name": key, "value": value} for key, value in environ.items()],
            "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts.items()],
        }  # fmt: skip
        user = {"runAsNonRoot": True, "runAsUser": 10001, "fsGroup": 10001}
        spec = {
            "containers": [container], "volumes": volumes, "automountServiceAccountToken": False,
            "securityContext": user | {"seccompProfile": {"type": "RuntimeDefault"}},
        }  # fmt: skip
        labels = {"seer/trainer": "true", "seer/scraper": "true"}
        metadata = {"name": name, "namespace": namespace, "labels": labels}
        self.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        kubectl("-n", namespace, "wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={READY_SECONDS}s",
                seconds=READY_SECONDS + 30)  # fmt: skip

    def install(self, kind):
        """Apply `base`, or with `pool` beside it, with small pods on CPUs; wait until all are ready."""
        mine = self.manifests / f"mine-{kind}"
        mine.mkdir()
        (mine / "kustomization.yaml").write_text(json.dumps(overlay(kind, self.core, self.cpu)))
        kubectl("apply", "-k", mine)
        for workload in kubectl("-n", "seer", "get", "statefulsets,deployments", "-o", "name").split():
            kubectl("-n", "seer", "rollout", "status", workload, f"--timeout={READY_SECONDS}s",
                    seconds=READY_SECONDS + 30)  # fmt: skip

    def trainer(self):
        """Start a pod with a trainer's key, prompts and the model's tokenizer."""
        volumes = [
            {"name": "key", "secret": {"secretName": "trainer", "defaultMode": 0o440}},
            {"name": "web", "secret": {"secretName": "web", "defaultMode": 0o440}},
            {"name": "given", "configMap": {"name": "given"}},
        ]
        own = {"SEER_SECURITY__KEY": "/key/key", "SEER_SECURITY__SERVER": "/key/server.pub"}
        self.pod("seer-trainers", "trainer", volumes, {"key": "/key", "web": "/web", "given": "/given"}, own)

    def inside(self, *command, seconds=ROLLOUT_SECONDS):
        """Run a command in the trainer's pod."""
        return kubectl("-n", "seer-trainers", "exec", "trainer", "--", *command, seconds=seconds)

    def status(self):
        """Return what the buffer tells an observer."""
        command = ("seer", "status", "--json", "--connect", "tcp://seer-head:7101")
        return json.loads(kubectl("-n", "seer", "exec", "seer-head-0", "-c", "buffer", "--", *command))


def rolled(cluster, name, meanwhile=None):
    """Run a rollout in the trainer's pod, and something once its first group is done; return its output."""
    out = f"/tmp/{name}.jsonl"
    command = [*map(str, support.rollout("/given", f"/given/{PROMPTS.name}", out, HEAD))]
    inside = ["kubectl", "-n", "seer-trainers", "exec", "trainer", "--", "seer", *command]
    with subprocess.Popen(inside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            if meanwhile is not None:
                count = f"cat {out}.journal 2> /dev/null | wc -l"
                until(
                    "a group", ROLLOUT_SECONDS, lambda: int(cluster.inside("sh", "-c", count)) > 1, pause=0.1
                )
                meanwhile()
                assert process.poll() is None, f"the rollout was over too soon:\n{process.stdout.read()}"
            said, _ = process.communicate(timeout=ROLLOUT_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 0, said
    found = cluster.folder / f"{name}.jsonl"
    found.write_text(cluster.inside("cat", out))
    return found


def rollouts(cluster):
    say("rollout without disturbance")
    reference = rolled(cluster, "reference")
    say("rollout with the head's pod and an engine's deleted at once")
    pods = ("seer-head-0", "seer-engine-0")
    disturbed = rolled(
        cluster,
        "disturbed",
        lambda: kubectl("-n", "seer", "delete", "pod", *pods, "--force", "--grace-period=0"),
    )
    responses, tokens = support.check_same(disturbed, reference)
    say(f"{responses} responses, {tokens} tokens: each once, same as undisturbed")
    return reference


def pool(cluster, reference):
    """The same tokens with a KV pool, of which the engines read."""
    cluster.install("pool")
    support.check_same(rolled(cluster, "pool"), reference)
    engines = [each["stats"] for each in cluster.status()["buffer"]["instances"]]
    assert sum(each["pool_saved_blocks"] for each in engines) > 0, engines
    assert sum(each["pool_failures"] for each in engines) == 0, engines
    say(f"with a pool: the same tokens, {sum(each['pool_saved_blocks'] for each in engines)} blocks saved")


def metrics(cluster):
    told = cluster.inside("python3", "-c", SCRAPE)
    assert 'seer_engines{state="serving"} 2.0' in told, told


def revoked(cluster):
    """A trainer's key is refused soon after the ConfigMap of the keys has changed."""
    run(Path(sys.executable).with_name("seer"), "keys", "revoke", cluster.keys, "trainer:run")
    cluster.publish()

    def refused():
        try:
            cluster.inside("seer", "status", "--connect", HEAD)
        except subprocess.CalledProcessError as error:
            return "does not admit this process's key" in error.stdout + error.stderr
        return False

    until("a revoked key is refused", REVOKED_SECONDS, refused, pause=5.0)


def test():
    check_cluster()
    with support.scratch() as folder, Cluster(folder) as cluster:
        cluster.prepare()
        say("waiting until all pods are ready")
        cluster.install("base")
        cluster.trainer()
        metrics(cluster)
        reference = rollouts(cluster)
        pool(cluster, reference)
        revoked(cluster)
    say("passed")


if __name__ == "__main__":
    support.main(test)
