#!/usr/bin/env bash
# The GKE cluster with the Ray operator, which brings the TPU webhook, and Workload Identity. On a Standard cluster its
# first node pool is the CPU pool, where the Ray head runs.
source "$(dirname "$0")/lib.sh"
refuse_placeholders project_id

flags=(
  "$PROJECT_FLAG" --location="$CLUSTER_LOCATION" --release-channel=regular --service-account="$(account_email nodes)"
  --enable-ray-cluster-logging --enable-ray-cluster-monitoring --labels="$OWNER_LABEL"
)

create() {
  if [[ $CLUSTER_MODE == autopilot ]]; then
    # The gcsfuse driver, Workload Identity and the enforcement of network policies are always on in Autopilot.
    run gcloud container clusters create-auto "$CLUSTER_NAME" "${flags[@]}" --enable-ray-operator
  else
    # --addons switches off what it does not name, so the two defaults are named too. Dataplane V2 enforces network
    # policies. One zone, because the count of nodes is a count for each zone.
    run gcloud container clusters create "$CLUSTER_NAME" "${flags[@]}" \
      --addons=RayOperator,GcsFuseCsiDriver,HttpLoadBalancing,HorizontalPodAutoscaling \
      --workload-pool="$PROJECT_ID.svc.id.goog" --enable-dataplane-v2 --enable-ip-alias --enable-shielded-nodes \
      --node-locations="$ZONE" --machine-type=e2-standard-8 --num-nodes=1 \
      --enable-autoscaling --min-nodes=1 --max-nodes=3 --workload-metadata=GKE_METADATA
  fi
}

# An existing cluster may be somebody else's: what it lacks is named together with the command that adds it.
check() {
  local state ray gcsfuse pool
  state=$(ask gcloud container clusters describe "$CLUSTER_NAME" "$PROJECT_FLAG" --location="$CLUSTER_LOCATION" \
    --format="csv[no-heading](addonsConfig.rayOperatorConfig.enabled,addonsConfig.gcsFuseCsiDriverConfig.enabled,workloadIdentityConfig.workloadPool)")
  IFS=, read -r ray gcsfuse pool <<<"$state"
  if [[ $ray != True || $gcsfuse != True ]]; then
    die "cluster $CLUSTER_NAME lacks the Ray operator or the gcsfuse driver. Add them with:" \
      "$(in_full gcloud container clusters update "$CLUSTER_NAME" "$PROJECT_FLAG" --location="$CLUSTER_LOCATION" \
        --update-addons=RayOperator=ENABLED,GcsFuseCsiDriver=ENABLED)"
  fi
  if [[ $pool != "$PROJECT_ID.svc.id.goog" ]]; then
    die "cluster $CLUSTER_NAME has no Workload Identity. Add it with:" \
      "$(in_full gcloud container clusters update "$CLUSTER_NAME" "$PROJECT_FLAG" --location="$CLUSTER_LOCATION" \
        --workload-pool="$PROJECT_ID.svc.id.goog")"
  fi
}

what="$CLUSTER_MODE cluster $CLUSTER_NAME in $CLUSTER_LOCATION"
if absent "$what" gcloud container clusters list "$PROJECT_FLAG" --location="$CLUSTER_LOCATION" \
  --filter="name~^$CLUSTER_NAME\$" --format="value(name)"; then
  create
else
  status=$(ask gcloud container clusters list "$PROJECT_FLAG" --location="$CLUSTER_LOCATION" \
    --filter="name~^$CLUSTER_NAME\$" --format="value(status)")
  if [[ $status == PROVISIONING ]]; then
    # An earlier run was interrupted while Google Cloud went on.
    wait_for_operation CREATE_CLUSTER "$CLUSTER_NAME"
  elif [[ $status == ERROR ]]; then
    die "$what is in state ERROR. Remove it, then run this again:" \
      "$(in_full gcloud container clusters delete "$CLUSTER_NAME" "$PROJECT_FLAG" --location="$CLUSTER_LOCATION")"
  fi
  check
fi
