#!/usr/bin/env bash
# The bucket of checkpoints and data, in the region of the TPUs: a checkpoint of an 8B model is about 96 GB, and reading
# it across regions is slow and billed. HIERARCHICAL_NAMESPACE=yes makes renames atomic, which writing through the mount
# at /data would need; training itself writes to gs:// and does not.
source "$(dirname "$0")/lib.sh"
refuse_placeholders project_id bucket

namespace_flags=()
if [[ ${HIERARCHICAL_NAMESPACE:-no} == yes ]]; then namespace_flags=(--enable-hierarchical-namespace); fi

if absent "bucket gs://$BUCKET in $REGION" \
  gcloud storage buckets list "$PROJECT_FLAG" --filter="name~^$BUCKET\$" --format="value(name)"; then
  # No soft delete: MaxText deletes old checkpoints by itself, and each would be billed for another week.
  run gcloud storage buckets create "gs://$BUCKET" "$PROJECT_FLAG" --location="$REGION" --uniform-bucket-level-access \
    --public-access-prevention --soft-delete-duration=0 --lifecycle-file="$ROOT/infra/bucket-lifecycle.json" \
    ${namespace_flags[@]+"${namespace_flags[@]}"}
elif ! planning; then
  location=$(ask gcloud storage buckets describe "gs://$BUCKET" "$PROJECT_FLAG" --format="value(location)")
  location=$(printf '%s' "$location" | tr '[:upper:]' '[:lower:]')
  if [[ $location != "$REGION" ]]; then
    note "warning: gs://$BUCKET is in $location, the TPUs are in $REGION: checkpoints will be slow, and egress is billed."
  fi
fi

# grant ROLE MEMBER: a role on this bucket only.
grant() {
  if absent "$1 on it for $2" granted_on_bucket "$1" "$2"; then
    run gcloud storage buckets add-iam-policy-binding "gs://$BUCKET" "$PROJECT_FLAG" --member="$2" --role="$1" --format=none
  fi
}

# Cloud Build reads the source that image.sh uploads here.
grant roles/storage.objectViewer "serviceAccount:$(account_email build)"
