#!/usr/bin/env bash
# Check that the account which is logged in has the roles that the other steps need, and list who needs which.
# Only roles granted on the project itself can be seen: one that comes through a group, a folder or the organization is
# reported as missing although it works. So this step warns and does not stop.
source "$(dirname "$0")/lib.sh"
refuse_placeholders project_id

# Role, and the step that needs it.
ROLES="
roles/serviceusage.serviceUsageAdmin   apis.sh: enable APIs
roles/cloudquotas.viewer               quota.sh: see how many TPU chips the project may use
roles/iam.serviceAccountAdmin          accounts.sh: create the nodes' and the builder's service account
roles/resourcemanager.projectIamAdmin  accounts.sh: let them log
roles/iam.serviceAccountUser           cluster.sh, image.sh: run nodes and builds as them
roles/artifactregistry.admin           registry.sh: create the repository and its grants
roles/storage.admin                    bucket.sh: create the bucket and its grants
roles/container.admin                  cluster.sh, node-pools.sh, kubectl: the cluster and what runs on it
roles/cloudbuild.builds.editor         image.sh: submit builds
roles/logging.viewer                   image.sh: read the build's log
"
# Only a workload policy is made through Compute Engine.
if needs_workload_policy; then
  ROLES="$ROLES
roles/compute.instanceAdmin.v1         node-pools.sh: create the workload policy
"
fi

if planning; then
  note "whoever runs these steps needs these roles on project $PROJECT_ID:"
  while read -r role why; do
    if [[ -n $role ]]; then note "  $role  ($why)"; fi
  done <<<"$ROLES"
  exit 0
fi

account=$(ask gcloud config get-value account)
if [[ -z $account ]]; then die "nobody is logged in" "log in with: gcloud auth login"; fi
case $account in
  *.gserviceaccount.com) member="serviceAccount:$account" ;;
  *) member="user:$account" ;;
esac
granted=$(ask gcloud projects get-iam-policy "$PROJECT_ID" --flatten="bindings[].members" \
  --filter="bindings.members~^$member\$" --format="value(bindings.role)")

if grep -qxF "roles/owner" <<<"$granted"; then
  note "there: $account owns project $PROJECT_ID"
  exit 0
fi
lacking=0
while read -r role why; do
  if [[ -z $role ]] || grep -qxF "$role" <<<"$granted"; then continue; fi
  lacking=$((lacking + 1))
  note "missing: $role for $account ($why). Whoever administers the project can run:"
  in_full gcloud projects add-iam-policy-binding "$PROJECT_ID" --member="$member" --role="$role" --condition=None
done <<<"$ROLES"
if ((lacking == 0)); then
  note "there: every role that $account needs"
else
  note "$lacking roles are not granted to $account on the project itself. That is fine if they come through a group or folder."
fi
