#!/usr/bin/env bash
# The TPU node pools of a Standard cluster: one pool is one slice. Autopilot makes nodes when pods ask for them.
source "$(dirname "$0")/lib.sh"
refuse_placeholders project_id

if needs_workload_policy; then
  if absent "workload policy $(workload_policy) in $REGION" \
    gcloud compute resource-policies list "$PROJECT_FLAG" --filter="name~^$(workload_policy)\$ AND region~/$REGION\$" \
    --format="value(name)"; then
    run gcloud compute resource-policies create workload-policy "$(workload_policy)" "$PROJECT_FLAG" --region="$REGION" \
      --type=HIGH_THROUGHPUT --accelerator-topology="$TOPOLOGY"
  fi
fi

if [[ $CLUSTER_MODE == autopilot ]]; then
  note "no node pools to make: Autopilot adds the TPU hosts when the workers ask for them"
  exit 0
fi

# A pool of one host is a slice by its machine type, and Google Cloud refuses a topology for it.
placement=()
if needs_workload_policy; then
  placement=(--placement-policy="$(workload_policy)")
elif ((HOSTS_PER_SLICE > 1)); then
  placement=(--tpu-topology="$TOPOLOGY" --placement-type=COMPACT)
fi

case $CAPACITY in
  on-demand) capacity=(--num-nodes="$HOSTS_PER_SLICE" --reservation-affinity=none) ;;
  spot) capacity=(--num-nodes="$HOSTS_PER_SLICE" --spot) ;;
  reservation)
    if [[ -z $RESERVATION ]]; then
      die "capacity is reservation, but no reservation is named" \
        "give it with: make reconfigure ARGS=reservation=NAME"
    fi
    capacity=(--num-nodes="$HOSTS_PER_SLICE" --reservation-affinity=specific --reservation="$RESERVATION")
    ;;
  flex-start)
    # The pool starts empty and grows to the whole slice at once when capacity is granted.
    capacity=(
      --flex-start --num-nodes=0 --enable-autoscaling --min-nodes=0 --max-nodes="$HOSTS_PER_SLICE" --location-policy=ANY
      --reservation-affinity=none --no-enable-autorepair
    )
    ;;
  *) die "capacity '$CAPACITY' in run.env is none of on-demand, spot, reservation, flex-start" ;;
esac

# One Ray worker and GKE's own pods fit into 32; the default of 110 would take a /24 of addresses for each host.
# Nodes reach Google Cloud with the rights of their service account, so the scope does not narrow them further.
common=(
  --cluster="$CLUSTER_NAME" "$PROJECT_FLAG" --location="$CLUSTER_LOCATION" --node-locations="$ZONE"
  --machine-type="$MACHINE_TYPE" --disk-type="$BOOT_DISK_TYPE" --disk-size=100GB
  --service-account="$(account_email nodes)" --scopes=cloud-platform --workload-metadata=GKE_METADATA
  --enable-gvnic --max-pods-per-node=32
)

for ((slice = 0; slice < NUM_SLICES; slice++)); do
  pool=$(pool_name "$slice")
  what="node pool $pool: slice $((slice + 1)) of $NUM_SLICES, $HOSTS_PER_SLICE x $MACHINE_TYPE, $CAPACITY"
  status=""
  if ! planning; then
    status=$(ask gcloud container node-pools list --cluster="$CLUSTER_NAME" "$PROJECT_FLAG" \
      --location="$CLUSTER_LOCATION" --filter="name~^$pool\$" --format="value(status)")
  fi
  case $status in
    PROVISIONING)
      if checking; then note "missing: it is being made: $what"; fi
      wait_for_operation CREATE_NODE_POOL "$pool"
      continue
      ;;
    ERROR)
      # What a slice without capacity leaves behind; it holds nothing and never recovers.
      if checking; then note "missing: it is in state ERROR: $what"; else note "in state ERROR, so made again: $what"; fi
      run gcloud container node-pools delete "$pool" --cluster="$CLUSTER_NAME" "$PROJECT_FLAG" \
        --location="$CLUSTER_LOCATION" --quiet
      ;;
    "") if planning; then note "$what"; else lacking "$what"; fi ;;
    *)
      note "there: $what"
      continue
      ;;
  esac
  run gcloud container node-pools create "$pool" "${common[@]}" ${placement[@]+"${placement[@]}"} "${capacity[@]}"
done
