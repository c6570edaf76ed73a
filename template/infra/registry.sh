#!/usr/bin/env bash
# The Artifact Registry repository of the image, next to the nodes that pull it.
source "$(dirname "$0")/lib.sh"
refuse_placeholders project_id

if absent "Artifact Registry repository $REGISTRY in $REGION" \
  gcloud artifacts repositories list "$PROJECT_FLAG" --location="$REGION" \
  --filter="name~/repositories/$REGISTRY\$" --format="value(name)"; then
  # A tag comes from the image's content, so it must never point at anything else.
  run gcloud artifacts repositories create "$REGISTRY" "$PROJECT_FLAG" --location="$REGION" \
    --repository-format=docker --immutable-tags --labels="$OWNER_LABEL" --description="Images for TPU training"
fi

# grant ROLE ACCOUNT: a role on this repository only.
grant() {
  if absent "$1 on it for $2" \
    gcloud artifacts repositories get-iam-policy "$REGISTRY" "$PROJECT_FLAG" --location="$REGION" \
    --flatten="bindings[].members" --filter="bindings.role~^$1\$ AND bindings.members~^serviceAccount:$2\$" \
    --format="value(bindings.role)"; then
    run gcloud artifacts repositories add-iam-policy-binding "$REGISTRY" "$PROJECT_FLAG" --location="$REGION" \
      --member="serviceAccount:$2" --role="$1" --format=none
  fi
}

grant roles/artifactregistry.reader "$(account_email nodes)"
grant roles/artifactregistry.writer "$(account_email build)"
