#!/usr/bin/env bash
# Let the pods of the run, and nothing else, use the bucket: Workload Identity makes the Kubernetes service account a
# principal of its own, so there is no key and no Google service account in between.
source "$(dirname "$0")/lib.sh"
refuse_placeholders project_id bucket

plan_project_number
principal=$(pods_principal)
for role in "${BUCKET_ROLES[@]}"; do
  if absent "$role on gs://$BUCKET for $NAMESPACE/$SERVICE_ACCOUNT" \
    granted_on_bucket "$role" "$principal"; then
    run gcloud storage buckets add-iam-policy-binding "gs://$BUCKET" "$PROJECT_FLAG" --member="$principal" \
      --role="$role" --format=none
  fi
done
