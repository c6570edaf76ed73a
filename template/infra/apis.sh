#!/usr/bin/env bash
# Enable the APIs that the other steps call.
source "$(dirname "$0")/lib.sh"
refuse_placeholders project_id

APIS=(
  artifactregistry.googleapis.com # the image
  cloudbuild.googleapis.com       # builds it
  cloudquotas.googleapis.com      # how many TPU chips the project may use
  cloudresourcemanager.googleapis.com # the project's roles
  compute.googleapis.com          # nodes, workload policies
  container.googleapis.com        # GKE
  iam.googleapis.com              # service accounts, Workload Identity
  logging.googleapis.com
  monitoring.googleapis.com
  storage.googleapis.com          # checkpoints and data
  tpu.googleapis.com
)

missing=("${APIS[@]}")
if ! planning; then
  enabled=$(ask gcloud services list --enabled "$PROJECT_FLAG" --format="value(config.name)")
  missing=()
  for api in "${APIS[@]}"; do
    if ! grep -qxF "$api" <<<"$enabled"; then missing+=("$api"); fi
  done
fi

if ((${#missing[@]} == 0)); then
  note "there: all ${#APIS[@]} APIs"
else
  if checking; then note "missing: APIs ${missing[*]}"; else note "APIs: enable ${#missing[@]} of ${#APIS[@]}"; fi
  run gcloud services enable "${missing[@]}" "$PROJECT_FLAG"
fi
