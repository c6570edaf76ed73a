"""The Kubernetes side of the run: the cluster of run.env, its objects as the API writes them, and its Ray token."""

import base64
import dataclasses
import json
import os
import subprocess
from typing import Any

import urllib3
from kubernetes import client, config

from ops.run_env import RunEnv
from ops.terminal import UserError

CALL_SECONDS = 30  # for one call; waits are made of many
RAY = {"group": "ray.io", "version": "v1"}

Object = dict[str, Any]  # as `kubectl get -o json` shows it


class Unreachable(UserError):
    """The API server did not answer; it may in a moment."""


@dataclasses.dataclass(frozen=True)
class Kube:
    """A connection to the cluster of run.env. `context` is kubectl's name for it."""

    run: RunEnv
    context: str
    api: client.ApiClient

    def cluster(self, name: str | None = None) -> Object | None:
        """Return the RayCluster `name` (default: the run's own), None when there is none."""
        return self._custom("rayclusters", name or self.run.raycluster_name)

    def job(self) -> Object | None:
        """Return the run's RayJob, None when there is none."""
        return self._custom("rayjobs", self.run.raycluster_name)

    def pods(self, cluster: str) -> list[Object]:
        """Return the pods of the RayCluster `cluster`, head and workers."""
        return self._items(
            client.CoreV1Api(self.api).list_namespaced_pod,
            self.run.namespace,
            label_selector=f"ray.io/cluster={cluster}",
        )

    def events(self) -> list[Object]:
        """Return the events of the run's namespace that the API still keeps (an hour by default)."""
        return self._items(client.CoreV1Api(self.api).list_namespaced_event, self.run.namespace)

    def provisioning_requests(self) -> list[Object]:
        """Return the ProvisioningRequests of the namespace; none where GKE has no such resource."""
        try:
            found = self._call(
                client.CustomObjectsApi(self.api).list_namespaced_custom_object,
                group="autoscaling.x-k8s.io",
                version="v1",
                namespace=self.run.namespace,
                plural="provisioningrequests",
            )
        except UserError:
            return []
        return list((found or {}).get("items", []))

    def custom_resource(self, name: str) -> Object | None:
        """Return a CustomResourceDefinition, e.g. rayjobs.ray.io, None when the cluster has none."""
        found = self._json(client.ApiextensionsV1Api(self.api).read_custom_resource_definition, name)
        return dict(found) if found else None

    def operator_image(self) -> str | None:
        """Return the image of a Ray operator that runs in the cluster; None where GKE hosts it elsewhere."""
        found = self._items(
            client.AppsV1Api(self.api).list_deployment_for_all_namespaces,
            label_selector="app.kubernetes.io/name=kuberay-operator",
        )
        return str(found[0]["spec"]["template"]["spec"]["containers"][0]["image"]) if found else None

    def has_service_account(self) -> bool:
        """True when the pods' service account exists."""
        read = client.CoreV1Api(self.api).read_namespaced_service_account
        return self._json(read, self.run.service_account, self.run.namespace) is not None

    def version(self) -> str:
        """Return the version of Kubernetes."""
        return str(self._json(client.VersionApi(self.api).get_code)["gitVersion"])

    def delete(self, plural: str, name: str) -> bool:
        """Ask for a Ray object and its pods to be removed; return whether there was one."""
        answer = self._call(
            client.CustomObjectsApi(self.api).delete_namespaced_custom_object,
            **RAY,
            namespace=self.run.namespace,
            plural=plural,
            name=name,
        )
        return answer is not None

    def secret(self, name: str, key: str) -> str | None:
        """Return one value of a Secret as text, None when there is none."""
        found = self._json(client.CoreV1Api(self.api).read_namespaced_secret, name, self.run.namespace)
        value = ((found or {}).get("data") or {}).get(key)
        return base64.b64decode(value).decode() if value else None

    def token(self, cluster: Object) -> str | None:
        """Return the token that the head of `cluster` asks for, None when it asks for none.

        Raises UserError when it asks for one that is not there.
        """
        source = token_source(cluster)
        if source is None:
            return None
        token = self.secret(*source)
        if token is None:
            raise UserError(f"the Ray head wants a token, but secret {source[0]} has no {source[1]}: make cluster")
        return token

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        """Run kubectl in this cluster and return what it prints. Raises UserError with kubectl's own words."""
        try:
            done = subprocess.run(
                self.command(*arguments), input=given, capture_output=True, text=True, timeout=10 * CALL_SECONDS
            )
        except FileNotFoundError:
            raise UserError("kubectl is not installed: gcloud components install kubectl") from None
        except subprocess.TimeoutExpired:
            raise Unreachable(f"kubectl {arguments[0]} did not end within {10 * CALL_SECONDS} s") from None
        if done.returncode:
            raise UserError(done.stderr.strip() or f"kubectl {arguments[0]} ended with {done.returncode}")
        return done.stdout

    def command(self, *arguments: str) -> list[str]:
        """Return the kubectl command line for this cluster and namespace."""
        return ["kubectl", f"--context={self.context}", f"--namespace={self.run.namespace}", *arguments]

    def _custom(self, plural: str, name: str) -> Object | None:
        found = self._call(
            client.CustomObjectsApi(self.api).get_namespaced_custom_object,
            **RAY,
            namespace=self.run.namespace,
            plural=plural,
            name=name,
        )
        return dict(found) if found else None

    def _items(self, function: Any, *arguments: Any, **named: Any) -> list[Object]:
        return list((self._json(function, *arguments, **named) or {}).get("items", []))

    def _json(self, function: Any, *arguments: Any, **named: Any) -> Any:
        answer = self._call(function, *arguments, **named, _preload_content=False)
        return json.loads(answer.data) if answer is not None else None

    def _call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        """Call the API; None for what does not exist. Raises UserError."""
        try:
            return function(*arguments, **named, _request_timeout=CALL_SECONDS)
        except client.ApiException as problem:
            if problem.status == 404:
                return None
            if problem.status in (401, 403):
                said = json.loads(problem.body).get("message", "") if problem.body else problem.reason
                raise UserError(f"you may not do that in cluster {self.run.cluster_name}: {said}") from None
            raise Unreachable(f"the API server answered {problem.status} {problem.reason}") from None
        except (urllib3.exceptions.HTTPError, OSError) as problem:
            raise Unreachable(
                f"cluster {self.run.cluster_name} does not answer ({type(problem).__name__})", "check the network"
            ) from None
        except config.ConfigException as problem:
            raise UserError(f"no login for cluster {self.run.cluster_name}: {problem}") from None


def connect(run: RunEnv) -> Kube:
    """Return a connection to the cluster of `run`, whatever kubectl's current context is.

    KUBE_CONTEXT names a context by another name than `gcloud container clusters get-credentials` gives it.
    Raises UserError when kubectl does not know the cluster.
    """
    run.refuse_placeholders("project_id", "bucket")
    context = os.environ.get("KUBE_CONTEXT") or f"gke_{run.project_id}_{run.cluster_location}_{run.cluster_name}"
    try:
        api = config.new_client_from_config(context=context)
    except config.ConfigException:
        raise UserError(
            f"kubectl knows no cluster '{context}': make infra-credentials (KUBE_CONTEXT=... names another)"
        ) from None
    api.configuration.retries = 1
    return Kube(run, context, api)


def token_source(cluster: Object) -> tuple[str, str] | None:
    """Return secret and key of the token that the head of `cluster` asks for, None when it asks for none."""
    spec = cluster["spec"]
    if (spec.get("authOptions") or {}).get("mode") == "token":
        return cluster["metadata"]["name"], "auth_token"  # KubeRay makes it
    for variable in head_container(cluster).get("env", []):
        if variable["name"] == "RAY_AUTH_TOKEN":
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            return (reference["name"], reference["key"]) if reference else None
    return None


def head_container(cluster: Object) -> Object:
    """Return the head's container as the RayCluster specifies it."""
    return dict(cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0])


def image_of(cluster: Object) -> str:
    """Return the tag of the image that `cluster` runs."""
    return str(head_container(cluster)["image"]).rpartition(":")[2]
