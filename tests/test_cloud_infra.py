"""infra/*.sh against a recording stand-in for gcloud: order, running twice, going on after a failure, removal."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cloud_support import VARIANTS, StandIn, plan_lines, render, run_env, variant

SEQUENCE = [
    "services enable",
    "iam service-accounts create",
    "projects add-iam-policy-binding",
    "iam service-accounts create",
    "projects add-iam-policy-binding",
    "artifacts repositories create",
    "artifacts repositories add-iam-policy-binding",
    "artifacts repositories add-iam-policy-binding",
    "storage buckets create",
    "storage buckets add-iam-policy-binding",
    "container clusters create",
    "container node-pools create",
    "storage buckets add-iam-policy-binding",
    "storage buckets add-iam-policy-binding",
    "container clusters get-credentials",
]


@pytest.fixture
def cloud(tmp_path: Path) -> StandIn:
    return StandIn(variant("default"), tmp_path)


def verb(call: str) -> str:
    words = [word for word in call.split() if not word.startswith("--")]
    return " ".join(words[: 3 if words[0] not in ("services", "projects", "builds") else 2])


def changes(cloud: StandIn) -> list[str]:
    """Return what was changed in Google Cloud; get-credentials only writes kubectl's own file."""
    return [call for call in cloud.calls() if "get-credentials" not in call]


def test_infra_makes_everything_in_order(cloud: StandIn) -> None:
    done = cloud.run("all")
    assert done.returncode == 0, done.stdout
    assert [verb(call) for call in cloud.calls()] == SEQUENCE


@pytest.mark.parametrize("name", ["default", "v6e-two-slices-spot", "tpu7x-multi-host", "v6e-autopilot-spot"])
def test_infra_twice_changes_nothing(name: str, tmp_path: Path) -> None:
    cloud = StandIn(variant(name), tmp_path)
    assert cloud.run("all").returncode == 0
    cloud.forget()
    done = cloud.run("all")
    assert done.returncode == 0, done.stdout
    assert changes(cloud) == []


def test_infra_continues_after_each_step_fails_in_turn(cloud: StandIn) -> None:
    for step in range(1, len(SEQUENCE) + 1):
        failed = cloud.run("all", STAND_IN_FAIL_AT=str(step))
        assert failed.returncode != 0
        assert "run the same make target again" in failed.stdout
        assert len(cloud.calls()) == step - 1
    done = cloud.run("all")
    assert done.returncode == 0, done.stdout
    # All the runs together did each step once, in order.
    assert [verb(call) for call in cloud.calls()] == SEQUENCE


def test_a_question_that_cannot_be_asked_stops_the_step_before_it_makes_anything(tmp_path: Path) -> None:
    cloud = StandIn(variant("default"), tmp_path)
    cloud.state.unlink()
    done = cloud.run("registry")
    assert done.returncode != 0
    assert "gcloud auth login" in done.stdout


@pytest.mark.parametrize(
    "script",
    [
        "all",
        "apis",
        "roles",
        "quota",
        "accounts",
        "registry",
        "bucket",
        "cluster",
        "node-pools",
        "access",
        "image",
        "destroy",
    ],
)
def test_every_step_refuses_placeholders_by_name_and_calls_nothing(script: str, tmp_path: Path) -> None:
    cloud = StandIn(variant("placeholders"), tmp_path)
    done = cloud.run(script)
    assert done.returncode != 0
    assert "project_id" in done.stdout
    assert "make reconfigure ARGS=" in done.stdout
    assert cloud.data["asked"] == cloud.data["calls"] == []


def test_only_the_missing_apis_are_enabled(cloud: StandIn) -> None:
    cloud.edit(resources={"services": {"container.googleapis.com": "", "storage.googleapis.com": ""}})
    cloud.run("apis")
    (call,) = cloud.calls()
    assert "compute.googleapis.com" in call
    assert "container.googleapis.com" not in call


def test_missing_roles_are_listed_with_the_command_that_grants_them(cloud: StandIn) -> None:
    member = "user:me@example.com"
    cloud.edit(resources={"grants": {f"project roles/container.admin {member}": ""}})
    done = cloud.run("roles")
    assert done.returncode == 0
    assert "missing: roles/artifactregistry.admin" in done.stdout
    assert "missing: roles/container.admin" not in done.stdout
    assert "gcloud projects add-iam-policy-binding acme-tpu" in done.stdout
    assert cloud.calls() == []


def test_an_owner_lacks_no_role(cloud: StandIn) -> None:
    cloud.edit(resources={"grants": {"project roles/owner user:me@example.com": ""}})
    assert "missing" not in cloud.run("roles").stdout


FAMILY = "TPUS-PER-TPU-FAMILY-per-project-region"
SPOT = "PREEMPTIBLE-TPU-V6E-per-project-region"


@pytest.mark.parametrize(
    ("answers", "quotas", "status", "said"),
    [
        ({}, [f"{FAMILY},us-east5,CT6E,16"], 0, f"there: {FAMILY}:CT6E allows 16 chips in us-east5"),
        ({}, [f"{FAMILY},us-east5,CT6E,-1"], 0, "any number of chips"),
        ({}, [f"{FAMILY},us-east5,CT6E,8"], 1, f"needs 16 chips in us-east5, and {FAMILY}:CT6E allows 8."),
        # No number is a zero.
        ({}, [f"{FAMILY},us-east5,CT6E,"], 1, "allows 0."),
        # Other regions, other families and defaults say nothing about this one.
        ({}, [f"{FAMILY},us-east1,CT6E,8", f"{FAMILY},us-east5,CT3,8", f"{FAMILY},,,0"], 0, "no value for us-east5"),
        ({}, [], 0, "no value for us-east5"),
        ({"num_slices": "2"}, [f"{FAMILY},us-east5,CT6E,16"], 1, "2 x v6e 4x4 with capacity on-demand needs 32"),
        ({"capacity": "spot"}, [f"{FAMILY},us-east5,CT6E,64", f"{SPOT},us-east5,,8"], 1, f"{SPOT} allows 8."),
        # Flex-start may take from either.
        ({"capacity": "flex-start"}, [f"{FAMILY},us-east5,CT6E,16", f"{SPOT},us-east5,,8"], 0, "there"),
        ({"capacity": "flex-start"}, [f"{SPOT},us-east5,,16"], 0, "there"),
        ({"capacity": "flex-start"}, [f"{FAMILY},us-east5,CT6E,8", f"{SPOT},us-east5,,0"], 1, "allows 0, "),
        ({"capacity": "flex-start"}, [f"{SPOT},us-east5,,0"], 0, "no value for us-east5"),
        ({"generation": "tpu7x"}, [f"{FAMILY},us-central1,TPU7X,4"], 1, f"{FAMILY}:tpu7x allows 4"),
        ({"generation": "tpu7x", "capacity": "spot"}, [], 0, "is not documented"),
        ({"capacity": "reservation", "reservation": "mine"}, [], 0, "counted when it was made"),
    ],
)
def test_too_small_a_quota_stops_before_anything_is_made(
    answers: dict[str, str], quotas: list[str], status: int, said: str, tmp_path: Path
) -> None:
    cloud = StandIn(render(**answers), tmp_path)
    cloud.edit(quotas=quotas)
    done = cloud.run("quota")
    assert done.returncode == status, done.stdout
    assert said in done.stdout
    if status:
        assert "console.cloud.google.com/iam-admin/quotas?project=acme-tpu" in done.stdout
        assert cloud.run("quota", CHECK_QUOTA="no").returncode == 0
        assert cloud.run("all").returncode == status
        assert [verb(call) for call in cloud.calls()] == ["services enable"]


def test_a_quota_that_cannot_be_read_is_said_and_stops_nothing(cloud: StandIn) -> None:
    done = cloud.run("quota")
    assert done.returncode == 0
    assert "quota: not checked" in done.stdout


@pytest.mark.parametrize("name", [name for name in VARIANTS if "reservation" not in name])
def test_the_plan_names_quota_and_chips(name: str) -> None:
    repository = variant(name)
    values = run_env(repository)
    text = subprocess.run(
        ["bash", "infra/quota.sh"],
        cwd=repository,
        env={"PATH": "/usr/bin:/bin", "PLAN": "yes"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    chips = int(values["CHIPS_PER_SLICE"]) * int(values["NUM_SLICES"])
    assert f"needed in {values['REGION']}: room for {chips} chips in {values['QUOTAS'].split(',')[0]}" in text


def test_a_pool_that_failed_for_want_of_capacity_is_made_again(cloud: StandIn) -> None:
    cloud.edit(resources={"pools": {"v6e-4x4-on-demand-0": "ERROR"}})
    assert cloud.run("node-pools").returncode == 0
    assert [verb(call) for call in cloud.calls()] == ["container node-pools delete", "container node-pools create"]


def test_an_interrupted_pool_or_cluster_is_waited_for(cloud: StandIn) -> None:
    cloud.edit(resources={"clusters": {"my-tpu-run": "PROVISIONING"}, "pools": {"v6e-4x4-on-demand-0": "PROVISIONING"}})
    assert cloud.run("cluster").returncode == 0
    assert cloud.run("node-pools").returncode == 0
    assert [verb(call) for call in cloud.calls()] == ["container operations wait"]


def test_a_cluster_without_the_operator_is_refused_with_the_command_that_adds_it(cloud: StandIn) -> None:
    cloud.edit(resources={"clusters": {"my-tpu-run": "RUNNING"}}, cluster_state=",True,acme-tpu.svc.id.goog")
    done = cloud.run("cluster")
    assert done.returncode != 0
    assert "--update-addons=RayOperator=ENABLED" in done.stdout


def test_a_bucket_in_another_region_is_pointed_out(cloud: StandIn) -> None:
    cloud.edit(resources={"buckets": {"acme-tpu-data": "US"}})
    done = cloud.run("bucket")
    assert done.returncode == 0
    assert "is in us, the TPUs are in us-east5" in done.stdout


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "placeholders"])
def test_the_plan_prints_exactly_what_the_steps_run(name: str, tmp_path: Path) -> None:
    cloud = StandIn(variant(name), tmp_path)
    assert cloud.run("all").returncode == 0
    assert cloud.run("image").returncode == 0
    planned = [shlex.split(line)[1:] for line in plan_lines(variant(name))]
    planned = [[word.replace("$PROJECT_NUMBER", "123456789012") for word in call] for call in planned]
    assert planned == cloud.data["calls"]


def test_the_plan_states_the_price_with_its_date_and_the_cost_of_the_steps(tmp_path: Path) -> None:
    def plan(repository: Path, **environment: str) -> str:
        return subprocess.run(
            ["bash", "infra/plan.sh"],
            cwd=repository,
            env={"PATH": "/usr/bin:/bin", **environment},
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    repository = variant("default")
    values = run_env(repository)
    hour = float(values["PRICE_PER_CHIP_HOUR"]) * 16
    text = plan(repository, STEP_SECONDS="36")
    assert f"about {hour:.2f} USD an hour: 16 chips" in text
    assert values["PRICE_DATE"] in text
    assert f"100 steps of 36 s: 1.0 hours, about {hour:.2f} USD" in text
    assert "no price is known for tpu7x" in plan(variant("tpu7x-multi-host"))


def test_an_image_whose_tag_exists_is_not_built_again(cloud: StandIn) -> None:
    assert cloud.run("image").returncode == 0
    assert [verb(call) for call in cloud.calls()] == ["builds submit"]
    cloud.forget()
    assert "there: image" in cloud.run("image").stdout
    assert cloud.calls() == []


def make_all(cloud: StandIn) -> None:
    assert cloud.run("all").returncode == 0
    cloud.forget()


def test_destroy_asks_first_and_without_an_answer_removes_nothing(cloud: StandIn) -> None:
    make_all(cloud)
    done = cloud.run("destroy")
    assert done.returncode != 0
    assert "nothing was removed" in done.stdout
    assert cloud.calls() == []


DESTROY = [
    "container clusters delete",
    "artifacts repositories delete",
    "projects remove-iam-policy-binding",
    "iam service-accounts delete",
    "projects remove-iam-policy-binding",
    "iam service-accounts delete",
    "storage buckets remove-iam-policy-binding",
    "storage buckets remove-iam-policy-binding",
    "storage buckets remove-iam-policy-binding",
]


def test_destroy_removes_the_cluster_first_and_keeps_the_bucket(cloud: StandIn) -> None:
    make_all(cloud)
    done = cloud.run("destroy", CONFIRM="my-tpu-run")
    assert done.returncode == 0, done.stdout
    assert [verb(call) for call in cloud.calls()] == DESTROY
    assert list(cloud.data["resources"]["buckets"]) == ["acme-tpu-data"]
    assert cloud.data["resources"]["grants"] == {}


def test_destroy_removes_the_bucket_only_when_told_and_confirmed(cloud: StandIn) -> None:
    make_all(cloud)
    assert cloud.run("destroy", CONFIRM="my-tpu-run", BUCKET_TOO="yes").returncode != 0
    assert cloud.calls() == []
    done = cloud.run("destroy", CONFIRM="my-tpu-run", BUCKET_TOO="yes", CONFIRM_BUCKET="acme-tpu-data")
    assert done.returncode == 0, done.stdout
    assert cloud.data["resources"]["buckets"] == {}


def test_destroy_continues_after_each_step_fails_in_turn(cloud: StandIn) -> None:
    make_all(cloud)
    for step in range(1, len(DESTROY) + 1):
        assert cloud.run("destroy", CONFIRM="my-tpu-run", STAND_IN_FAIL_AT=str(step)).returncode != 0
    assert cloud.run("destroy", CONFIRM="my-tpu-run").returncode == 0
    assert [verb(call) for call in cloud.calls()] == DESTROY


def test_destroy_twice_changes_nothing(cloud: StandIn) -> None:
    make_all(cloud)
    assert cloud.run("destroy", CONFIRM="my-tpu-run").returncode == 0
    cloud.forget()
    assert cloud.run("destroy", CONFIRM="my-tpu-run").returncode == 0
    assert cloud.calls() == []


def test_destroy_leaves_a_cluster_that_the_scripts_did_not_make(cloud: StandIn) -> None:
    make_all(cloud)
    cloud.edit(foreign=["my-tpu-run"])
    done = cloud.run("destroy", CONFIRM="my-tpu-run")
    assert done.returncode == 0
    assert not any("clusters delete" in call or "repositories delete" in call for call in cloud.calls())


def test_destroy_removes_the_workload_policy_of_tpu7x(tmp_path: Path) -> None:
    cloud = StandIn(variant("tpu7x-multi-host"), tmp_path)
    make_all(cloud)
    assert cloud.run("destroy", CONFIRM="my-tpu-run").returncode == 0
    assert "compute resource-policies delete" in [verb(call) for call in cloud.calls()]


@pytest.mark.parametrize("cluster", ["c", "my-tpu-run", "a-cluster-name-of-exactly-40-characters0"])
def test_service_accounts_fit_google_clouds_limits(cluster: str, tmp_path: Path) -> None:
    cloud = StandIn(render(cluster_name=cluster), tmp_path)
    cloud.run("accounts")
    accounts = [call.split()[3] for call in cloud.calls() if "service-accounts create" in call]
    assert len(accounts) == 2
    assert all(6 <= len(account) <= 30 for account in accounts)


def test_two_long_cluster_names_get_different_service_accounts(tmp_path: Path) -> None:
    made = set()
    for end in ("one", "two"):
        (tmp_path / end).mkdir()
        cloud = StandIn(render(cluster_name=f"a-long-name-of-a-cluster-{end}"), tmp_path / end)
        cloud.run("accounts")
        made |= {call.split()[3] for call in cloud.calls() if "service-accounts create" in call}
    assert len(made) == 4


def test_a_project_of_a_domain_has_its_own_form_of_account_and_image(tmp_path: Path) -> None:
    lines = plan_lines(render(project_id="example.com:acme-tpu"))
    assert any("@acme-tpu.example.com.iam.gserviceaccount.com" in line for line in lines)
    assert any("-docker.pkg.dev/example.com/acme-tpu/" in line for line in lines)


def test_every_make_target_that_the_files_name_exists() -> None:
    repository = variant("default")
    targets = set(re.findall(r"^([a-z-]+%?):", (repository / "Makefile").read_text(), re.MULTILINE))
    steps = {f"infra-{path.stem}" for path in (repository / "infra").glob("*.sh")}
    for folder in ("infra", "k8s", "ops"):
        for path in (repository / folder).rglob("*"):
            if path.suffix not in (".sh", ".yaml", ".py"):
                continue
            for name in re.findall(r"(?:`|: |or )make ([a-z][a-z-]*)\b", path.read_text()):
                assert name in targets | steps, f"{path.relative_to(repository)} names make {name}"


def test_shellcheck_has_nothing_to_say() -> None:
    folder = variant("default") / "infra"
    checked = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", "-x", "-P", str(folder), *map(str, sorted(folder.glob("*.sh")))],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout
