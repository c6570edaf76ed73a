"""Which TPU hosts Ray has, and a wait for them that ends and explains itself."""

import os
import threading
import time

import ray
from ray.util import placement_group_table

from ops.run_env import RunEnv

POLL_SECONDS = 2
REPORT_SECONDS = 30
# Spot and flex-start capacity may take a while; past this a person should look. In minutes.
WAIT_MINUTES = float(os.environ.get("HOST_WAIT_MINUTES", "60"))
# How long a run that has enough slices to start with waits for the rest: less than what a start and a restart cost.
REST_MINUTES = 5.0


def present(run: RunEnv) -> dict[str, set[str]]:
    """Return the worker ids (TPU_WORKER_ID) of the live hosts of this generation and slice size, by slice name."""
    slices: dict[str, set[str]] = {}
    for node in ray.nodes():
        labels, resources = node["Labels"], node["Resources"]
        if not node["Alive"] or f"accelerator_type:{run.ray_accelerator_type}" not in resources:
            continue
        # A slice of one host may come without the slice's labels: it is then its own slice.
        if labels.get("ray.io/tpu-pod-type", run.ray_pod_type) == run.ray_pod_type:
            name = labels.get("ray.io/tpu-slice-name", node["NodeID"])
            slices.setdefault(name, set()).add(labels.get("ray.io/tpu-worker-id", "0"))
    return slices


def missing(run: RunEnv, wanted_slices: int) -> str:
    """Return what is missing in one sentence, empty when every host of so many slices is there."""
    slices = present(run)
    count = sum(len(workers) for workers in slices.values())
    complete = sum(len(workers) >= run.hosts_per_slice for workers in slices.values())
    if complete >= wanted_slices:
        return ""
    wanted = {str(number) for number in range(run.hosts_per_slice)}
    gaps = [
        f"{name} lacks host {', '.join(sorted(wanted - have, key=int))}"
        for name, have in sorted(slices.items())
        if wanted - have
    ]
    return ": ".join(
        filter(None, [f"{count} of {run.num_hosts} {run.ray_pod_type} hosts have joined Ray", "; ".join(gaps)])
    )


def wait(run: RunEnv, minutes: float = WAIT_MINUTES) -> None:
    """Return once every host is there; a run that goes on with fewer slices waits REST_MINUTES for those it can miss.

    Raises TimeoutError after `minutes`.
    """
    wait_for(run, run.min_slices, minutes)
    if not run.elastic:
        return
    try:
        wait_for(run, run.num_slices, min(minutes, REST_MINUTES))
    except TimeoutError as error:
        print(f"note: starts without them: {error}", flush=True)


def wait_for(run: RunEnv, slices: int, minutes: float) -> None:
    """Return once every host of so many slices is there; print what is missing meanwhile. Raises TimeoutError."""
    deadline = time.monotonic() + minutes * 60
    reported = None
    while gap := missing(run, slices):
        now = time.monotonic()
        if now > deadline:
            raise TimeoutError(f"waited {minutes:g} min, but only {gap}")
        if reported is None or now - reported > REPORT_SECONDS:
            print(f"waiting for hosts: {gap}", flush=True)
            reported = now
        time.sleep(POLL_SECONDS)


def watch(run: RunEnv, minutes: float = WAIT_MINUTES) -> None:
    """End this process with code 1 when too few slices are left, or Ray cannot place the workers, for `minutes`.

    Ray Train itself would retry for ever.
    """

    def loop() -> None:
        unplaced_since = None
        while True:
            time.sleep(REPORT_SECONDS)
            try:
                wait_for(run, run.min_slices, minutes)
                now = time.monotonic()
                waiting = [group for group in placement_group_table().values() if group["state"] == "PENDING"]
                unplaced_since = (unplaced_since or now) if waiting else None
                if unplaced_since is not None:
                    print(f"waiting for Ray to place {waiting[0]['bundles']} on the hosts", flush=True)
                    if now - unplaced_since > minutes * 60:
                        raise TimeoutError(
                            f"waited {minutes:g} min, but Ray finds no place for {waiting[0]['bundles']}: "
                            "another job holds the hosts, or they offer less (`ray status` on the head tells)"
                        )
            except TimeoutError as error:
                print(f"error: {error}. Started again, the run resumes from its last checkpoint.", flush=True)
                os._exit(1)

    threading.Thread(target=loop, name="host-watch", daemon=True).start()
