"""Every gcloud line of the rendered scripts through gcloud's own linter and parser, and a table of answers to flags."""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cloud_support import (
    GENERATIONS,
    TEMPLATE,
    VARIANTS,
    StandIn,
    all_topologies,
    flags_of,
    plan_lines,
    render,
    run_env,
    variant,
)

needs_gcloud = pytest.mark.skipif(not shutil.which("gcloud"), reason="gcloud is not installed; CI runs this")


def lint(lines: list[str]) -> list[dict[str, Any]]:
    """Run `gcloud meta lint-gcloud-commands` over all lines at once."""
    commands = Path(os.environ.get("TMPDIR", "/tmp")) / f"copier-maxtext-ray-lint-{os.getpid()}.json"
    commands.write_text(json.dumps([{"command_string": line} for line in lines]))
    try:
        done = subprocess.run(
            ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={commands}"],
            check=True,
            capture_output=True,
            text=True,
        )
    finally:
        commands.unlink()
    results: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(results) == len(lines)
    return results


@functools.cache
def sdk() -> tuple[str, str]:
    """Return the folder of the installed gcloud and the Python that it runs with."""
    root, python = subprocess.run(
        ["gcloud", "info", "--format=value(installation.sdk_root,basic.python_location)"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return root, python


def parse(lines: list[str]) -> list[dict[str, Any]]:
    """Parse all lines with the parser of the installed gcloud."""
    root, python = sdk()
    done = subprocess.run(
        [python, str(TEMPLATE / "tests/cloud_gcloud_parser.py"), root],
        input="".join(f"{line}\n" for line in lines),
        check=True,
        capture_output=True,
        text=True,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(lines), done.stderr
    return results


def all_lines(repository: Path) -> list[str]:
    """Return every changing command of infra, image and destroy."""
    lines = plan_lines(repository) + plan_lines(repository, "destroy", BUCKET_TOO="yes")
    lines += plan_lines(repository, "destroy") + plan_lines(repository, "bucket", HIERARCHICAL_NAMESPACE="yes")
    return list(dict.fromkeys(lines))


def accept(lines: list[str]) -> None:
    """Fail with every line that gcloud's linter or parser refuses, or of which its parser loses a flag."""
    assert lines
    problems = []
    for line, linted, parsed in zip(lines, lint(lines), parse(lines), strict=True):
        if not linted["success"]:
            problems.append(f"{line}\n  lint: {linted['error_message']}")
        if "error" in parsed:
            problems.append(f"{line}\n  parser: {parsed['error']}")
            continue
        for name, value in flags_of(line).items():
            seen = parsed["arguments"].get(f"--{name.removeprefix('--')}", parsed["arguments"].get(_positive(name)))
            if seen is None:
                problems.append(f"{line}\n  parser lost {name}={value}")
    assert not problems, "\n".join(problems)


def _positive(flag: str) -> str:
    return re.sub(r"^--no-", "--", flag)


@needs_gcloud
def test_gcloud_accepts_every_line_of_every_variant() -> None:
    accept(list(dict.fromkeys(line for name in VARIANTS for line in all_lines(variant(name)))))


@needs_gcloud
@pytest.mark.sweep
def test_gcloud_accepts_every_line_of_every_slice_and_capacity() -> None:
    lines = []
    for generation, topology in all_topologies():
        for capacity in ("on-demand", "spot", "reservation", "flex-start"):
            if capacity == "flex-start" and not GENERATIONS[generation]["flex_start"]:
                continue
            extra = {"reservation": "block-a"} if capacity == "reservation" else {}
            # Only the pools' commands follow from slice and capacity.
            lines += plan_lines(
                render(generation=generation, topology=topology, capacity=capacity, **extra), "node-pools"
            )
    accept(list(dict.fromkeys(lines)))


@needs_gcloud
def test_gcloud_accepts_every_question_that_the_scripts_ask(tmp_path: Path) -> None:
    asked: list[str] = []
    for name in ("tpu7x-multi-host", "v6e-autopilot-spot"):
        (tmp_path / name).mkdir()
        cloud = StandIn(variant(name), tmp_path / name)
        cloud.edit(quotas=[])
        for _ in range(2):
            assert cloud.run("all").returncode == 0
            assert cloud.run("image").returncode == 0
        cloud.edit(resources=cloud.data["resources"] | {"pools": {"tpu7x-4x4x4-on-demand-0": "PROVISIONING"}})
        cloud.run("node-pools")
        assert cloud.run("destroy", CONFIRM="my-tpu-run").returncode == 0
        asked += [shlex.join(["gcloud", *call]) for call in cloud.data["asked"]]
        asked += [shlex.join(["gcloud", *call]) for call in cloud.data["calls"] if "wait" in call]
    accept(list(dict.fromkeys(asked)))


def matches(pairs: list[tuple[str, dict[str, Any]]]) -> list[bool]:
    """Ask gcloud's filter engine about each pair; a warning that its answer will change one day is a failure."""
    root, python = sdk()
    done = subprocess.run(
        [python, str(TEMPLATE / "tests/cloud_gcloud_filter.py"), root],
        input="".join(f"{json.dumps(pair)}\n" for pair in pairs),
        check=True,
        capture_output=True,
        text=True,
    )
    assert "WARNING" not in done.stderr, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_gcloud
def test_every_filter_finds_its_own_resource_and_no_other(tmp_path: Path) -> None:
    cloud = StandIn(variant("tpu7x-multi-host"), tmp_path)
    cloud.edit(quotas=[])
    for script in ("all", "image"):
        assert cloud.run(script).returncode == 0
    (tmp_path / "both").mkdir()
    both = StandIn(render(capacity="flex-start"), tmp_path / "both")
    both.edit(quotas=[])
    assert both.run("quota").returncode == 0
    assert cloud.run("destroy", CONFIRM="my-tpu-run").returncode == 0
    asked = cloud.data["asked"] + both.data["asked"]
    filters = {flag[len("--filter=") :] for call in asked for flag in call if flag.startswith("--filter=")}
    assert filters

    def example(expression: str, suffix: str) -> dict[str, Any]:
        """Build the resource that the expression looks for, or with a suffix one whose name goes on."""
        resource: dict[str, Any] = {"resourceLabels": {"created-by": "copier-maxtext-ray"}}
        resource["labels"] = resource["resourceLabels"]
        resource["region"] = "https://www.googleapis.com/compute/v1/projects/acme-tpu/regions/us-central1"
        for key, operator, value in re.findall(r"([\w.]+)(=|~)\^?([^\s$]+)", expression):
            if key == "region" or "created-by" in key:
                continue
            text = f"projects/p/locations/l{value}" if operator == "~" and value.startswith("/") else value
            text += suffix
            first, _, second = key.partition(".")
            if second:
                resource.setdefault(first, {})[second] = text
            else:
                resource[first] = [text] if first == "tags" else text
        return resource

    order = sorted(filters)
    assert matches([(expression, example(expression, "")) for expression in order]) == [True] * len(order)
    assert matches([(expression, example(expression, "-2")) for expression in order]) == [False] * len(order)


@needs_gcloud
def test_the_quotas_are_printed_as_the_script_reads_them(tmp_path: Path) -> None:
    cloud = StandIn(variant("default"), tmp_path)
    cloud.edit(quotas=[])
    cloud.run("quota")
    (asked,) = cloud.data["asked"]
    flags = flags_of(shlex.join(asked))
    assert flags["--flatten"] == "dimensionsInfos[]"
    quota = "TPUS-PER-TPU-FAMILY-per-project-region"
    infos: list[dict[str, Any]] = [
        {"dimensions": {"region": "us-east5", "tpu_family": "CT6E"}, "details": {"value": "16"}},
        {"dimensions": {"region": "us-east5", "tpu_family": "CT3"}, "details": {}},
        {"details": {"value": "-1"}},
    ]
    root, python = sdk()
    printed = subprocess.run(
        [python, str(TEMPLATE / "tests/cloud_gcloud_format.py"), root, "dimensionsInfos", flags["--format"]],
        input=json.dumps([{"quotaId": quota, "dimensionsInfos": infos}]),
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert printed == [f"{quota},us-east5,CT6E,16", f"{quota},us-east5,CT3,", f"{quota},,,-1"]


@needs_gcloud
def test_a_repeated_flag_and_an_unknown_one_would_be_caught() -> None:
    create = "gcloud container clusters create c --location=us-east5"
    with pytest.raises(AssertionError, match="twice"):
        accept([f"{create} --addons=RayOperator --addons=GcsFuseCsiDriver"])
    with pytest.raises(AssertionError, match="unrecognized"):
        accept(["gcloud container clusters create-auto c --location=us-east5 --machine-type=n1-standard-16"])
    (parsed,) = parse([f"{create} --addons=RayOperator --addons=GcsFuseCsiDriver"])
    assert "RayOperator" not in parsed["arguments"]["--addons"]


@functools.cache
def pool_flags(name: str) -> list[dict[str, str]]:
    return [flags_of(line) for line in plan_lines(variant(name)) if "node-pools create" in line]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("default", {"--num-nodes": "4", "--tpu-topology": "4x4", "--placement-type": "COMPACT"}),
        ("default", {"--reservation-affinity": "none", "--machine-type": "ct6e-standard-4t"}),
        ("default", {"--disk-type": "hyperdisk-balanced", "--node-locations": "us-east5-b"}),
        ("v4", {"--machine-type": "ct4p-hightpu-4t", "--tpu-topology": "2x2x4", "--num-nodes": "4"}),
        (
            "v5e-single-host-8t",
            {"--machine-type": "ct5lp-hightpu-8t", "--num-nodes": "1", "--disk-type": "pd-balanced"},
        ),
        ("v5e-one-chip-spot", {"--machine-type": "ct5lp-hightpu-1t", "--num-nodes": "1", "--spot": ""}),
        ("v5p-reservation", {"--reservation-affinity": "specific", "--reservation": "block-a", "--num-nodes": "16"}),
        ("v6e-two-slices-spot", {"--num-nodes": "8", "--spot": "", "--tpu-topology": "4x8"}),
        (
            "v6e-flex-start",
            {"--flex-start": "", "--num-nodes": "0", "--max-nodes": "16", "--reservation-affinity": "none"},
        ),
        ("v6e-flex-start", {"--enable-autoscaling": "", "--location-policy": "ANY", "--no-enable-autorepair": ""}),
        (
            "v6e-shared-reservation",
            {"--reservation": "projects/other-project/reservations/res/reservationBlocks/block-1"},
        ),
        ("tpu7x-multi-host", {"--placement-policy": "tpu7x-4x4x4", "--num-nodes": "16"}),
        ("tpu7x-single-host", {"--num-nodes": "1", "--machine-type": "tpu7x-standard-4t"}),
    ],
)
def test_the_answers_give_the_pools_flags(name: str, flags: dict[str, str]) -> None:
    assert flags.items() <= pool_flags(name)[0].items()


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("v5e-single-host-8t", {"--tpu-topology", "--placement-type", "--placement-policy"}),
        ("v5e-one-chip-spot", {"--tpu-topology", "--reservation-affinity"}),
        ("tpu7x-single-host", {"--tpu-topology", "--placement-policy"}),
        ("tpu7x-multi-host", {"--tpu-topology", "--placement-type"}),
        ("default", {"--spot", "--flex-start", "--enable-autoscaling", "--placement-policy"}),
    ],
)
def test_flags_that_google_cloud_refuses_there_are_absent(name: str, absent: set[str]) -> None:
    assert not absent & pool_flags(name)[0].keys()


def test_one_node_pool_is_one_slice() -> None:
    lines = [line for line in plan_lines(variant("v6e-two-slices-spot")) if "node-pools create" in line]
    assert len(lines) == 2
    names = [line.split()[4] for line in lines]
    assert names == ["v6e-4x8-spot-0", "v6e-4x8-spot-1"]


def test_autopilot_makes_no_node_pools_but_the_workload_policy() -> None:
    lines = plan_lines(variant("tpu7x-autopilot-two-slices"))
    assert not any("node-pools" in line for line in lines)
    (policy,) = [line for line in lines if "workload-policy" in line]
    assert flags_of(policy)["--accelerator-topology"] == "2x2x2"


@pytest.mark.parametrize("name", VARIANTS)
def test_every_disk_suits_the_generation(name: str) -> None:
    generation = run_env(variant(name))["GENERATION"]
    for flags in pool_flags(name):
        assert flags["--disk-type"] == GENERATIONS[generation]["boot_disk_type"]


# The faults of the tutorial that the commands leave behind. F numbers are those of the project's list of faults.


def cluster_line(name: str) -> str:
    (line,) = [line for line in plan_lines(variant(name)) if "clusters create" in line]
    return line


def test_f1_addons_is_one_flag() -> None:
    assert cluster_line("default").count("--addons") == 1
    assert {"RayOperator", "GcsFuseCsiDriver"} <= set(flags_of(cluster_line("default"))["--addons"].split(","))


def test_f2_default_addons_stay_on() -> None:
    assert {"HttpLoadBalancing", "HorizontalPodAutoscaling"} <= set(
        flags_of(cluster_line("default"))["--addons"].split(",")
    )


def test_f3_autopilot_takes_no_machine_type() -> None:
    assert "--machine-type" not in flags_of(cluster_line("v6e-autopilot-spot"))


@pytest.mark.parametrize("name", VARIANTS)
def test_f4_one_location_is_used_for_the_cluster_everywhere(name: str) -> None:
    location = run_env(variant(name))["CLUSTER_LOCATION"]
    lines = [line for line in all_lines(variant(name)) if line.startswith("gcloud container")]
    assert {flags_of(line)["--location"] for line in lines} == {location}
    assert not any({"--zone", "--region"} & flags_of(line).keys() for line in lines)


def test_f5_no_line_holds_a_variable_that_nobody_set_or_its_literal_name() -> None:
    names = "|".join([*run_env(variant("default")), "LOCATION"])
    for name in VARIANTS:
        for line in all_lines(variant(name)):
            assert not re.search(r"\$(?!PROJECT_NUMBER\b)", line), line
            assert not re.search(rf"(?<![$\w])({names})\b", line), line


def test_f11_the_bucket_is_uniform_private_regional_and_not_soft_deleted() -> None:
    (line,) = [line for line in plan_lines(variant("default")) if "buckets create" in line]
    flags = flags_of(line)
    assert flags["--location"] == run_env(variant("default"))["REGION"]
    assert flags["--soft-delete-duration"] == "0"
    assert {"--uniform-bucket-level-access", "--public-access-prevention", "--lifecycle-file"} <= flags.keys()


def test_f12_the_pods_may_read_the_bucket_itself() -> None:
    lines = [line for line in plan_lines(variant("default")) if "principal://" in line]
    roles = {flags_of(line)["--role"] for line in lines}
    assert roles == {"roles/storage.objectUser", "roles/storage.legacyBucketReader"}


def test_f13_every_api_that_is_called_is_enabled() -> None:
    (line,) = [line for line in plan_lines(variant("default")) if "services enable" in line]
    for api in ("container", "cloudbuild", "artifactregistry", "storage", "compute", "iam", "tpu"):
        assert f" {api}.googleapis.com" in line


def test_f14_the_roles_of_every_step_are_listed() -> None:
    text = (variant("default") / "infra/roles.sh").read_text()
    for role in ("artifactregistry.admin", "storage.admin", "iam.serviceAccountUser", "serviceusage.serviceUsageAdmin"):
        assert f"roles/{role}" in text


def test_f24_the_build_has_a_machine_a_timeout_and_a_staged_source() -> None:
    (line,) = [line for line in plan_lines(variant("default")) if "builds submit" in line]
    assert "--tag" not in flags_of(line)
    assert flags_of(line)["--config"] == "cloudbuild.yaml"
    assert flags_of(line)["--gcs-source-staging-dir"].startswith("gs://acme-tpu-data/")


def test_f32_removal_names_the_cluster_as_it_was_made_and_keeps_the_bucket() -> None:
    for name in ("default", "v6e-autopilot-spot"):
        lines = plan_lines(variant(name), "destroy")
        assert not any("storage rm" in line for line in lines)
        (delete,) = [line for line in lines if "clusters delete" in line]
        assert flags_of(delete)["--location"] == flags_of(cluster_line(name))["--location"]


def test_f33_hosts_are_derived() -> None:
    values = run_env(variant("v5p-reservation"))
    assert pool_flags("v5p-reservation")[0]["--num-nodes"] == values["HOSTS_PER_SLICE"] == "16"
    assert "--threads-per-core" not in pool_flags("v5p-reservation")[0]


def test_f34_the_pool_states_capacity_scope_network_and_pods() -> None:
    flags = pool_flags("default")[0]
    assert {"--reservation-affinity", "--scopes", "--enable-gvnic", "--max-pods-per-node"} <= flags.keys()
    assert flags["--workload-metadata"] == "GKE_METADATA"
