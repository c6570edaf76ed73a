#!/usr/bin/env bash
# Remove what the scripts in this folder made, after asking. The bucket with the checkpoints stays unless BUCKET_TOO=yes,
# and then it is asked for on its own. A cluster or repository that these scripts did not make is left alone.
# For use without a terminal: CONFIRM=<cluster name>, and CONFIRM_BUCKET=<bucket>.
source "$(dirname "$0")/lib.sh"
refuse_placeholders project_id

# confirm QUESTION NAME GIVEN: go on only when NAME was typed, or given beforehand.
confirm() {
  local typed=$3
  if [[ -z $typed && -t 0 ]]; then
    printf '%s\nType %s to go on: ' "$1" "$2" >&2
    read -r typed
  fi
  [[ $typed == "$2" ]] || die "nothing was removed: '$2' was not confirmed."
}

# present COMMAND...: true when the question COMMAND has an answer; a plan supposes that everything is there.
present() {
  local answer
  if planning; then return 0; fi
  answer=$(ask "$@") || exit 1
  [[ -n $answer ]]
}

if [[ ${BUCKET_TOO:-no} == yes ]]; then
  refuse_placeholders bucket
  what_about_the_bucket="and gs://$BUCKET with every checkpoint in it"
else
  what_about_the_bucket="but not the bucket gs://$BUCKET"
fi
if ! planning; then
  confirm "This removes cluster $CLUSTER_NAME with all that runs on it, registry $REGISTRY with all its images, their service
accounts, $what_about_the_bucket, in project $PROJECT_ID." "$CLUSTER_NAME" "${CONFIRM:-}"
  if [[ ${BUCKET_TOO:-no} == yes ]]; then
    confirm "Deleted checkpoints cannot be brought back." "$BUCKET" "${CONFIRM_BUCKET:-}"
  fi
fi

# The cluster first: it is what costs money. Its node pools go with it.
if present gcloud container clusters list "$PROJECT_FLAG" --location="$CLUSTER_LOCATION" \
  --filter="name~^$CLUSTER_NAME\$ AND resourceLabels.${OWNER_LABEL/=/:}" --format="value(name)"; then
  run gcloud container clusters delete "$CLUSTER_NAME" "$PROJECT_FLAG" --location="$CLUSTER_LOCATION" --quiet
else
  note "gone, or not made by these scripts: cluster $CLUSTER_NAME"
fi

if needs_workload_policy; then
  if present gcloud compute resource-policies list "$PROJECT_FLAG" \
    --filter="name~^$(workload_policy)\$ AND region~/$REGION\$" --format="value(name)"; then
    run gcloud compute resource-policies delete "$(workload_policy)" "$PROJECT_FLAG" --region="$REGION" --quiet
  else
    note "gone: workload policy $(workload_policy)"
  fi
fi

if present gcloud artifacts repositories list "$PROJECT_FLAG" --location="$REGION" \
  --filter="name~/repositories/$REGISTRY\$ AND labels.${OWNER_LABEL/=/:}" --format="value(name)"; then
  run gcloud artifacts repositories delete "$REGISTRY" "$PROJECT_FLAG" --location="$REGION" --quiet
else
  note "gone, or not made by these scripts: registry $REGISTRY"
fi

# remove_account SUFFIX ROLE: the grants first, since a deleted account would leave them behind as dead entries.
remove_account() {
  local email
  email=$(account_email "$1")
  if present gcloud projects get-iam-policy "$PROJECT_ID" --flatten="bindings[].members" \
    --filter="bindings.role~^$2\$ AND bindings.members~^serviceAccount:$email\$" --format="value(bindings.role)"; then
    run gcloud projects remove-iam-policy-binding "$PROJECT_ID" --member="serviceAccount:$email" --role="$2" \
      --condition=None --format=none
  fi
  if present gcloud iam service-accounts list "$PROJECT_FLAG" --filter="email~^$email\$" --format="value(email)"; then
    run gcloud iam service-accounts delete "$email" "$PROJECT_FLAG" --quiet
  else
    note "gone: service account $email"
  fi
}

# revoke ROLE MEMBER: take a role on the bucket away.
revoke() {
  if present granted_on_bucket "$1" "$2"; then
    run gcloud storage buckets remove-iam-policy-binding "gs://$BUCKET" "$PROJECT_FLAG" --member="$2" --role="$1" \
      --format=none
  fi
}

remove_account nodes roles/container.defaultNodeServiceAccount
remove_account build roles/logging.logWriter

if [[ ${BUCKET_TOO:-no} != yes ]]; then
  # The grants of pods and builds go, or a later cluster with the same names would inherit them.
  plan_project_number
  principal=$(pods_principal)
  for role in "${BUCKET_ROLES[@]}"; do revoke "$role" "$principal"; done
  revoke roles/storage.objectViewer "serviceAccount:$(account_email build)"
  note "kept: gs://$BUCKET (BUCKET_TOO=yes removes it too)"
elif present gcloud storage buckets list "$PROJECT_FLAG" --filter="name~^$BUCKET\$" --format="value(name)"; then
  run gcloud storage rm "gs://$BUCKET" "$PROJECT_FLAG" --recursive
else
  note "gone: gs://$BUCKET"
fi
